"""python -m jaxhybrid.embed: one vector a text.

Reads texts, one a line, and writes one JSON object a text, or an .npz file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxhybrid.command import leave, make_callable, read_text, run_command, use_compilation_cache, use_utf8
from jaxhybrid.errors import UsageError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxhybrid.embed",
        description="Embed texts: hidden states of a language model, pooled.",
        epilog="Without texts and --file, standard input is read, one text a line.",
    )
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT")
    add("--file", metavar="FILE", help="texts in a UTF-8 file, one a line")
    add("--model", metavar="PATH", help="a Hugging Face folder, a .gguf file, or a hub id to download")
    add("--pooling", choices=["mean", "last", "none"], default="mean")
    add("--no-normalize", action="store_true", help="keep the length of the vectors")
    add("--output", metavar="FILE.npz", help="write one array, `embeddings`, instead of JSON lines")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the weights")
    add("--batch-size", type=int, default=16, metavar="N", help="texts side by side (default 16)")
    add("--ubatch", type=int, default=512, metavar="N", help="tokens per step (default 512)")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for an error, 2 for wrong usage."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    texts = _texts(args)
    if args.output and not args.output.endswith(".npz"):
        raise UsageError(f"--output {args.output}: the name must end in .npz")
    if args.output and args.pooling == "none":
        raise UsageError("--output: texts of different lengths make no array; use --pooling mean or last")
    use_compilation_cache()
    use_utf8(sys.stdout)
    from jaxhybrid.embedding import embed
    from jaxhybrid.report import load_model

    vectors = embed(
        load_model(args.model, args.dtype),
        texts,
        pooling=args.pooling,
        normalize=not args.no_normalize,
        n_ubatch=args.ubatch,
        batch_size=args.batch_size,
    )
    if args.output:
        import numpy as np

        from jaxhybrid.files.config import atomic_path

        with atomic_path(Path(args.output)) as temporary, open(temporary, "wb") as file:
            np.savez(file, embeddings=vectors)
        return 0
    for i, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        print(json.dumps({"index": i, "text": text, "embedding": vector.tolist()}, ensure_ascii=False))
    return 0


def _texts(args: argparse.Namespace) -> list[str]:
    if args.texts and args.file:
        raise UsageError("--file cannot be used together with texts; choose one")
    if args.texts:
        return args.texts
    if not args.file and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no texts: give some, --file FILE, or pipe them in")
    texts = read_text(args.file or "-").splitlines()
    if not texts:
        raise UsageError(f"{args.file or 'standard input'}: no texts, it is empty")
    return texts


make_callable(__name__, "jaxhybrid.embedding")


def entry() -> NoReturn:
    """Run the command as a process of its own."""
    leave(main())


if __name__ == "__main__":
    entry()

"""python -m jaxhybrid.perplexity: how well a model predicts a text.

Reads a text, writes one line of figures, or one JSON object, to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jaxhybrid.command import leave, make_callable, read_text, run_command, use_compilation_cache, use_utf8
from jaxhybrid.errors import UsageError

if TYPE_CHECKING:
    from jaxhybrid.rolling import Perplexity


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxhybrid.perplexity",
        description="Perplexity, bits per token and bits per byte of a text.",
        epilog="Without FILE, or with -, standard input is read. bits per byte compare between tokenizers.",
    )
    add = parser.add_argument
    add("file", nargs="?", default="-", metavar="FILE", help="a UTF-8 text")
    add("--model", metavar="PATH", help="a model folder, a .gguf file, or a hub id to download")
    add("--adapter", metavar="FOLDER", help="a LoRA adapter for the model, as PEFT writes it")
    add("--ctx", type=int, metavar="N", help="tokens of a window (default: 2048, or the model's context)")
    add("--stride", type=int, metavar="N", help="tokens from window to window (default: half of --ctx)")
    add("--continuous", action="store_true", help="no windows: the recurrent state runs on through the text")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the weights")
    add("--quantize", choices=["int8", "int8_block", "int4"], help="of the weights, while loading")
    add("--batch-size", type=int, default=1, metavar="N", help="windows side by side (default 1)")
    add("--ubatch", type=int, default=512, metavar="N", help="tokens of a window per step (default 512)")
    add("--json", action="store_true", help="one JSON object instead of a line")
    add("--quiet", action="store_true", help="no progress on a terminal")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for an error, 2 for wrong usage."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    if args.file == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no text: give a FILE, or pipe one in")
    text = read_text(args.file)
    use_compilation_cache()
    use_utf8(sys.stdout)
    from jaxhybrid.report import load_model, progress_bar
    from jaxhybrid.rolling import perplexity

    model = load_model(args.model, args.dtype, args.ctx, args.quantize, args.adapter)
    with progress_bar("reading the text") as progress:
        found = perplexity(
            model,
            text,
            ctx=args.ctx,
            stride=args.stride,
            continuous=args.continuous,
            batch_size=args.batch_size,
            n_ubatch=args.ubatch,
            progress=None if args.quiet else progress,
        )
    print(json.dumps(_as_json(found)) if args.json else _line(found), flush=True)
    return 0


def _line(found: Perplexity) -> str:
    windows = "one pass" if found.windows == 1 else f"{found.windows} windows"
    return (
        f"perplexity {found.perplexity:.4f} | {found.bits_per_token:.4f} bits per token | "
        f"{found.bits_per_byte:.4f} bits per byte | {found.n_scored} of {found.n_tokens} tokens scored, "
        f"{found.n_bytes} bytes, in {windows} | {found.seconds:.1f} s"
    )


def _as_json(found: Perplexity) -> dict[str, Any]:
    figures = {
        "perplexity": found.perplexity,
        "bits_per_token": found.bits_per_token,
        "bits_per_byte": found.bits_per_byte,
        "nll": found.nll,
    }
    return {
        # JSON has no NaN and no infinity
        **{
            name: value if value is not None and math.isfinite(value) else None
            for name, value in figures.items()
        },
        "tokens": found.n_tokens,
        "tokens_scored": found.n_scored,
        "bytes": found.n_bytes,
        "windows": found.windows,
        "seconds": round(found.seconds, 3),
    }


make_callable(__name__, "jaxhybrid.rolling")


def entry() -> NoReturn:
    """Run the command as a process of its own."""
    leave(main())


if __name__ == "__main__":
    entry()

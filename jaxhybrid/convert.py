"""python -m jaxhybrid.convert: a model from one form on disk to another.

Forms: a Hugging Face folder of safetensors files, an orbax folder (config.json and tokenizer beside an orbax
checkpoint of the parameters), and a GGUF file. Between folders equal dtypes give equal tensors, byte for
byte; GGUF files store decays and some norms in another form, which may round them.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxhybrid.command import leave, make_callable, run_command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxhybrid.convert",
        description="Convert a model between Hugging Face, orbax and GGUF, or quantize it.",
        epilog="The destination appears whole or not at all. Without --to, a name that ends in .orbax "
        "becomes an orbax folder, in .gguf a GGUF file, any other a Hugging Face folder.",
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a folder, a .gguf file, or a hub id to download")
    add("destination", metavar="DESTINATION", help="a folder or .gguf file to write")
    add("--to", choices=["safetensors", "orbax", "gguf"], help="the form to write")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of the weights (default: that of the source); norms, decays and biases are never narrowed",
    )
    add(
        "--quantize",
        choices=["int8", "int8_block", "int4"],
        help="of the large matrices; in GGUF files int8_block is Q8_0 and int4 is Q4_0, and such blocks stay "
        "as they are, while without it blocks become float32",
    )
    add("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    add("--force", action="store_true", help="replace a model that is at DESTINATION")
    add("--quiet", action="store_true", help="no report on standard error")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    from jaxhybrid.conversion import convert
    from jaxhybrid.report import progress_bar
    from jaxhybrid.units import readable_size

    with progress_bar("converting") as progress:
        convert(
            args.source,
            args.destination,
            to=args.to,
            dtype=args.dtype,
            quantize=args.quantize,
            force=args.force,
            tokenizer=not args.no_tokenizer,
            progress=progress,
        )
    if not args.quiet:
        written = Path(args.destination)
        files = [file for file in (written, *written.rglob("*")) if file.is_file()]
        size = sum(file.stat().st_size for file in files)
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        print(f"{args.destination}: {count}, {readable_size(size)}", file=sys.stderr)
    return 0


make_callable(__name__, "jaxhybrid.conversion")


def entry() -> NoReturn:
    """Run the command as a process of its own; ended by SIGTERM, it leaves nothing unfinished."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    leave(main())


if __name__ == "__main__":
    entry()

"""python -m jaxhybrid.inspect: what a model is, and whether its files are whole.

Prints layers and their kinds, numbers of parameters, and the bytes that a cache takes for a sequence and for
a token. A checkpoint that cannot be loaded is refused with everything that is missing, unexpected or of
another shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxhybrid.command import leave, make_callable, run_command, use_utf8


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxhybrid.inspect",
        description="Describe a model from its configuration, and check its files; no weight is read.",
    )
    add = parser.add_argument
    which = "a folder, a .gguf file or a hub id (default: the model in this package)"
    add("model", nargs="?", metavar="MODEL", help=which)
    add("--cache-dtype", choices=["float32", "bfloat16"], default="float32", help="of K and V")
    add("--json", action="store_true", help="one JSON object")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for a model that cannot be loaded, 2 for wrong usage."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    from jaxhybrid.inspection import inspect

    use_utf8(sys.stdout)
    found = inspect(args.model, dtype=args.cache_dtype)
    if args.json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
    else:
        for line in found.lines():
            print(line)
    for error in found.errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if found.errors else 0


make_callable(__name__, "jaxhybrid.inspection")


def entry() -> NoReturn:
    """Run the command as a process of its own."""
    leave(main())


if __name__ == "__main__":
    entry()

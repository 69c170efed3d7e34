# pyright: reportMissingImports=false
# lm-eval is an extra
"""python -m jaxhybrid.lm_eval: lm-evaluation-harness with the model class of this package.

The arguments are those of the command lm_eval, whose --model is jaxhybrid unless given. That command itself
knows no plugins: it would have to import `jaxhybrid.harness` first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxhybrid.command import leave, run_command, use_compilation_cache
from jaxhybrid.errors import UsageError

DEFAULTS = {("--model", "-M"): "jaxhybrid", ("--batch_size", "-b"): "auto"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for an error, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    return run_command(lambda: _run(arguments), debug)


def _run(arguments: list[str]) -> int:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise UsageError(
            f"python -m jaxhybrid.lm_eval needs lm-eval ({error}): pip install 'jaxhybrid[eval]'"
        ) from error
    import lm_eval.models  # noqa: F401  lm-eval's own, before the registry has any other

    import jaxhybrid.harness  # noqa: F401  registers the model

    use_compilation_cache()
    if arguments and not {"ls", "validate", "-h", "--help"} & set(arguments[:1]):
        rest = arguments[1:] if arguments[0] == "run" else arguments
        given = {word.partition("=")[0] for word in rest}
        added = [w for names, value in DEFAULTS.items() if not given & set(names) for w in (names[0], value)]
        arguments = ["run", *added, *rest]
    before, sys.argv = sys.argv, ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


def entry() -> NoReturn:
    """Run the command as a process of its own."""
    leave(main())


if __name__ == "__main__":
    entry()

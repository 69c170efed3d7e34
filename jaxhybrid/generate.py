"""python -m jaxhybrid.generate: text from a prompt, in one command.

Reads prompts, streams text to standard output and one line of figures to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxhybrid.command import (
    INTERRUPTED,
    leave,
    make_callable,
    read_text,
    run_command,
    until_interrupted,
    use_compilation_cache,
    use_utf8,
)
from jaxhybrid.errors import UsageError

if TYPE_CHECKING:
    from jaxhybrid.settings import Model, Piece, Result


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxhybrid.generate",
        description="Generate text with a hybrid language model.",
        epilog="Without --model, a small model inside the package is used: it needs no network.",
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="a model folder, a .gguf file, or a hub id to download")
    add("--adapter", metavar="FOLDER", help="a LoRA adapter for the model, as PEFT writes it")
    add("--prompt", action="append", default=[], help="text to continue; may be given several times")
    add(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a prompt in a UTF-8 file",
    )
    add("--chat", action="store_true", help="talk to the model through its chat template")
    add("--system", metavar="TEXT", help="a system message for --chat")
    add("--echo", action="store_true", help="print the prompt before the text")
    add("--save-session", metavar="DIR", help="keep the conversation there; each prompt is a turn")
    add("--load-session", metavar="DIR", help="go on with a conversation that was kept")
    add("--edit-last", action="store_true", help="the prompt replaces the last turn of the loaded session")
    add("--json", action="store_true", help="one JSON object per result instead of text")
    add("--quiet", action="store_true", help="no report on standard error")
    add("--debug", action="store_true", help="show the traceback of an error")
    model = parser.add_argument_group("model and memory")
    add = model.add_argument
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the weights")
    add("--quantize", choices=["int8", "int8_block", "int4"], help="of the weights, while loading")
    add("--ctx", type=int, metavar="N", help="tokens a sequence can hold (default: as needed)")
    add("--batch-size", type=int, default=16, metavar="N", help="prompts side by side (default 16)")
    add("--ubatch", type=int, default=512, metavar="N", help="tokens per prefill step (default 512)")
    add(
        "--context-shift",
        nargs="?",
        const="exact",
        default="off",
        choices=["exact", "lossy"],
        help="when the context is full, forget its older half; models with recurrent layers need 'lossy'",
    )
    drafting = parser.add_argument_group("speculative decoding: the same text in fewer steps")
    add = drafting.add_argument
    add("--ngram", type=int, default=0, metavar="N", help="guess what followed the same N tokens before")
    add("--draft", metavar="PATH", help="guess with a smaller model of the same tokenizer")
    add("--draft-tokens", type=int, default=4, metavar="K", help="tokens a guess (default 4)")
    sampling = parser.add_argument_group("sampling")
    add = sampling.add_argument
    add("--max-tokens", type=int, metavar="N", help="most tokens to write (default 256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens (0: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest mass P")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop below P times the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="R")
    add("--presence-penalty", type=float, default=0.0, metavar="R")
    add("--frequency-penalty", type=float, default=0.0, metavar="R")
    add("--seed", type=int, default=0, metavar="N", help="prompt i draws with seed N + i")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text")
    add("--stop-token", action="append", default=[], metavar="T", help="end at this token or id")
    add("--ignore-eos", action="store_true", help="go on after the end-of-text token")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, 1 for an error, 2 for wrong usage."""
    args = build_parser().parse_args(argv)
    return run_command(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    use_compilation_cache()
    from jaxhybrid import engine
    from jaxhybrid.conversation import Conversation
    from jaxhybrid.report import load_model, report
    from jaxhybrid.settings import Settings
    from jaxhybrid.terminal import converse

    settings = _settings(args)
    Settings(**settings)  # complain before a long load
    use_utf8(sys.stdout)
    model = load_model(args.model, args.dtype, args.ctx, args.quantize, args.adapter)
    settings["stop_tokens"] = tuple(_stop_token(model, text) for text in args.stop_token)
    if args.draft is not None:
        settings["draft"] = load_model(args.draft, args.dtype, args.ctx, args.quantize)
    Settings(**settings).check_model(model)
    if args.save_session or args.load_session:
        return _run_session(args, model, settings, prompts)
    if prompts is None:
        return converse(Conversation(model, settings, args.system), quiet=args.quiet)
    wanted: list[Any] = list(prompts)
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        wanted = [model.tokenizer.encode_chat([*system, {"role": "user", "content": p}]) for p in prompts]
    wanted = [engine.encode_prompt(model, prompt, i) for i, prompt in enumerate(wanted)]
    pieces = engine.stream(model, wanted, **settings)
    results, interrupted = _print_pieces(pieces, prompts, [len(w) for w in wanted], args)
    if not args.quiet and any(result.tokens for result in results):
        print(report(model, results), file=sys.stderr)
    return INTERRUPTED if interrupted else 0


def _run_session(
    args: argparse.Namespace, model: Model, settings: dict[str, Any], prompts: list[str] | None
) -> int:
    """A conversation that is loaded, kept or both: turn by turn from the prompts, or on the terminal."""
    from jaxhybrid.conversation import Conversation
    from jaxhybrid.report import report
    from jaxhybrid.session import load_session, save_session
    from jaxhybrid.terminal import converse, show

    save_to = Path(args.save_session) if args.save_session else None
    if args.load_session:
        conversation = load_session(args.load_session, model, settings)
        if conversation.chat != args.chat:
            kind = "with" if conversation.chat else "without"
            raise UsageError(f"--load-session {args.load_session}: it was kept {kind} --chat")
    else:
        conversation = Conversation(model, settings, args.system, chat=args.chat)
    if prompts is None:
        return converse(conversation, args.quiet, save_to)
    for i, prompt in enumerate(prompts):
        say = conversation.edit if args.edit_last and i == 0 else conversation.say
        if not args.json and len(prompts) > 1:
            print(f"=== prompt {i + 1}")
        result = say(prompt, (lambda text: None) if args.json else show)
        result.index = i
        print(json.dumps(_as_json(result, prompt), ensure_ascii=False) if args.json else "", flush=True)
        if save_to is not None:
            save_session(save_to, conversation)
        if not args.quiet:
            print(report(model, [result], computed=conversation.computed), file=sys.stderr)
        if result.finish_reason == "interrupted":
            return INTERRUPTED
    return 0


# ------------------------------------------------------------------------------------- arguments


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as fields of `Settings`."""
    return {
        "max_tokens": 256 if args.max_tokens is None else args.max_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "seed": args.seed,
        "stop": tuple(args.stop),
        "ignore_eos": args.ignore_eos,
        "n_ctx": args.ctx,
        "n_ubatch": args.ubatch,
        "batch_size": args.batch_size,
        "ngram": args.ngram,
        "draft_tokens": args.draft_tokens,
        "context_shift": args.context_shift,
    }


def _prompts(args: argparse.Namespace) -> list[str] | None:
    """All prompts, those of --prompt first; None for a conversation on a terminal."""
    if args.system is not None and not args.chat:
        raise UsageError("--system needs --chat")
    if args.edit_last and not args.load_session:
        raise UsageError("--edit-last needs --load-session")
    if args.system is not None and args.load_session:
        raise UsageError("--system cannot be changed in a session that is loaded")
    if args.ngram and args.draft:
        raise UsageError("--ngram and --draft cannot be used together; choose one")
    found = list(args.prompt) + [read_text(name) for name in args.prompt_file]
    if found:
        return found
    if sys.stdin is None or sys.stdin.isatty():
        if args.chat:
            for name in ("json", "echo", "edit_last"):
                if getattr(args, name):
                    option = "--" + name.replace("_", "-")
                    raise UsageError(f"{option} cannot be used in a conversation; give --prompt as well")
            return None
        raise UsageError("no prompt: give --prompt TEXT, --prompt-file FILE, --chat, or pipe one in")
    return [read_text("-")]


def _stop_token(model: Model, text: str) -> int:
    vocab = model.params.hparams.vocab_size
    if text.isdecimal():
        if int(text) >= vocab:
            raise UsageError(f"--stop-token {text}: the vocabulary has {vocab} tokens")
        return int(text)
    token = model.tokenizer.token_id(text)
    if token is None:
        raise UsageError(f"--stop-token {text!r} is no single token of this model; use --stop for any text")
    return token


# ---------------------------------------------------------------------------------------- output


def _print_pieces(
    pieces: Iterator[Piece], prompts: list[str], lengths: list[int], args: argparse.Namespace
) -> tuple[list[Result], bool]:
    """Print text as it comes, prompts in order. Returns the results and whether Ctrl-C ended it."""
    from jaxhybrid.settings import Result, Timings

    timings: dict[int, Timings] = {}
    several = len(prompts) > 1
    texts: dict[int, list[str]] = {i: [] for i in range(len(prompts))}
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    said = dict.fromkeys(range(len(prompts)), "")
    results: dict[int, Result] = {}
    shown, opened = 0, False  # the prompt being printed, and whether its header is out
    interrupted = False

    def show_text() -> None:
        nonlocal shown, opened
        while shown < len(prompts):
            waiting = texts[shown]
            if not opened and (waiting or shown in results):
                header = f"=== prompt {shown + 1}\n" if several else ""
                sys.stdout.write(header + (prompts[shown] if args.echo else ""))
                opened = True
            sys.stdout.write("".join(waiting))
            waiting.clear()
            if shown not in results:
                break
            sys.stdout.write("\n")
            shown, opened = shown + 1, False
        sys.stdout.flush()

    def show_json() -> None:
        nonlocal shown
        while shown in results:
            print(json.dumps(_as_json(results[shown], prompts[shown]), ensure_ascii=False), flush=True)
            shown += 1

    try:
        for piece in until_interrupted(pieces):
            texts[piece.index].append(piece.text)
            said[piece.index] += piece.text
            tokens[piece.index].extend(piece.tokens)
            timings[piece.index] = piece.timings
            if piece.result is not None:
                results[piece.index] = piece.result
            show_json() if args.json else show_text()
    except KeyboardInterrupt:
        interrupted = True
        for i, made in tokens.items():  # what was generated is not lost
            if i not in results and (made or not several):
                spent = timings.get(i, Timings())
                results[i] = Result(i, said[i], made, lengths[i], "interrupted", spent)
        show_json() if args.json else show_text()
    return [results[i] for i in sorted(results)], interrupted


def _as_json(result: Result, prompt: str) -> dict[str, Any]:
    return {
        "index": result.index,
        "prompt": prompt,
        "text": result.text,
        "tokens": result.tokens,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "timings": {
            "prompt_s": round(result.timings.prompt, 4),
            "decode_s": round(result.timings.decode, 4),
            "compile_s": round(result.timings.compile, 4),
        },
    }


make_callable(__name__, "jaxhybrid.engine")


def entry() -> NoReturn:
    """Run the command as a process of its own."""
    leave(main())


if __name__ == "__main__":
    entry()

"""python -m jaxhybrid.generate: what it prints, where, and with which exit code."""

import importlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny

command = importlib.import_module("jaxhybrid.generate")  # the attribute of the package is the function
ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs the command in this process: (exit code, standard output, standard error)."""
    monkeypatch.setenv(
        "JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    )

    def run(*arguments, stdin=b"", tty=False):
        stream = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        if tty:
            stream.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stream)
        try:
            code = command.main([str(a) for a in arguments])
        except SystemExit as end:  # argparse
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_text_goes_to_standard_output_and_one_line_of_figures_to_standard_error(run, folder):
    code, out, err = run("--model", folder, "--prompt", "hello", "--max-tokens", 8)
    assert code == 0 and len(out) > 1 and out.endswith("\n")
    assert err.count("\n") == 1
    for word in ("prompt 5 tokens", "decode 8 tokens", "/s", "compile", "weights", "attention cache"):
        assert word in err
    assert "recurrent cache" in err


def test_json_has_one_object_a_result_in_order(run, folder, tmp_path):
    (tmp_path / "p.txt").write_text("héllo")
    arguments = ["--prompt", "one", "--prompt", "two", "--prompt-file", tmp_path / "p.txt"]
    code, out, err = run("--model", folder, *arguments, "--max-tokens", 4, "--json", "--quiet")
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and err == ""
    assert [(r["index"], r["prompt"]) for r in results] == [(0, "one"), (1, "two"), (2, "héllo")]
    for r in results:
        assert len(r["tokens"]) == 4 and r["finish_reason"] == "length"
        assert set(r["timings"]) == {"prompt_s", "decode_s", "compile_s"}
    assert results[2]["prompt_tokens"] == 6


def test_several_prompts_get_headers_and_echo_shows_the_prompt(run, folder):
    prompts = ["--prompt", "one", "--prompt", "two", "--prompt", "six"]
    code, out, _ = run("--model", folder, *prompts, "--max-tokens", 4, "--echo")
    assert code == 0
    assert out.startswith("=== prompt 1\none") and "\n=== prompt 2\ntwo" in out


def test_standard_input_is_a_prompt(run, folder):
    piped = run("--model", folder, "--max-tokens", 8, "--quiet", stdin=b"hello")
    given = run("--model", folder, "--max-tokens", 8, "--quiet", "--prompt", "hello")
    dash = run("--model", folder, "--max-tokens", 8, "--quiet", "--prompt-file", "-", stdin=b"hello")
    assert piped == given == dash


def test_chat_uses_the_template(run, folder):
    _, plain, _ = run(
        "--model", folder, "--max-tokens", 8, "--json", "--prompt", "<|system|>be<|user|>hi<|assistant|>"
    )
    code, chat, _ = run(
        "--model", folder, "--max-tokens", 8, "--json", "--chat", "--system", "be", "--prompt", "hi"
    )
    assert code == 0
    assert json.loads(chat)["tokens"] == json.loads(plain)["tokens"]


BAD_USE = [
    (["--prompt", ""], "prompt 1 is empty"),
    (["--prompt", "a", "--max-tokens", "0"], "max_tokens: 0"),
    (["--prompt", "a", "--temperature", "-1"], "temperature"),
    (["--prompt", "a", "--top-p", "2"], "top_p"),
    (["--prompt", "a", "--stop", ""], "stop string is empty"),
    (["--prompt", "a", "--stop-token", "no such"], "use --stop for any text"),
    (["--prompt", "a", "--stop-token", "9999"], "vocabulary has 259"),
    (["--prompt", "hello", "--ctx", "4"], "the context holds 4"),
    (["--prompt-file", "/no/such/file"], "/no/such/file"),
    (["--prompt-file", "/"], "/: Is a directory"),
    (["--prompt-file", "a\0b"], "no file has such a name"),
    (["--prompt", "a", "--system", "b"], "--system needs --chat"),
    (["--prompt", "a", "--dtype", "int3"], "--dtype"),
    (["--prompt", "\udcff"], "not valid Unicode"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_USE)
def test_wrong_use_is_one_line_and_exit_code_2(run, folder, arguments, message):
    code, out, err = run("--model", folder, *arguments)
    assert code == 2 and out == "" and message in err
    last = err.strip().splitlines()[-1]
    assert message in last and "Traceback" not in err


def test_no_prompt_on_a_terminal_is_wrong_use(run, folder):
    code, _, err = run("--model", folder, tty=True)
    assert code == 2 and "--prompt" in err
    for more in (["--json"], ["--echo"], ["--load-session", "s", "--edit-last"]):
        code, _, err = run("--model", folder, "--chat", *more, tty=True)
        assert code == 2 and f"{more[-1]} cannot be used in a conversation" in err


def test_a_prompt_that_is_not_utf8_is_named(run, folder, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    code, out, err = run("--model", folder, "--prompt-file", tmp_path / "latin")
    assert (code, out) == (2, "")
    assert "latin" in err and "byte 3 (0xe9) is not UTF-8" in err
    code, _, err = run("--model", folder, stdin=b"\xff")
    assert code == 2 and "standard input: byte 0" in err


def spoil(folder, name, content):
    (folder / name).write_bytes(content)


BROKEN = {
    "no folder": (None, "no/such/folder"),
    "config is no JSON": (lambda f: spoil(f, "config.json", b"{"), "config.json"),
    "unknown model type": (
        lambda f: spoil(f, "config.json", b'{"model_type": "elephant"}'),
        "elephant",
    ),
    "truncated weights": (
        lambda f: spoil(f, "model.safetensors", (f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors",
    ),
    "hostile header": (
        lambda f: spoil(f, "model.safetensors", b"\xff" * 8 + b"{}"),
        "model.safetensors",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "wrong shape": (
        lambda f: spoil(f, "config.json", json.dumps(tiny.CONFIG | {"vocab_size": 300}).encode()),
        "embed_tokens.weight has shape (259, 16)",
    ),
    "missing tensor": (
        lambda f: spoil(
            f,
            "config.json",
            json.dumps(
                tiny.CONFIG | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}
            ).encode(),
        ),
        "model.layers.2",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_one_line_and_exit_code_1(run, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    damage, message = BROKEN[name]
    path = tmp_path / "no/such/folder"
    if damage is not None:
        path = tiny.write_folder(tmp_path)
        damage(path)
    code, out, err = run("--model", path, "--prompt", "a")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1 and err.startswith("error: ") and message in err


def test_debug_shows_the_traceback(run, tmp_path):
    with pytest.raises(Exception, match="no-such"):
        run("--model", tmp_path / "no-such", "--prompt", "a", "--debug")


# --------------------------------------------------------------------------- in a process of its own


def start(folder, *arguments, **options):
    words = [sys.executable, "-m", "jaxhybrid.generate", "--model", folder, *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT, **options)


def test_ctrl_c_ends_cleanly_with_what_was_generated(folder):
    process = start(
        folder,
        *("--prompt", "hello", "--ignore-eos", "--max-tokens", 400_000, "--ctx", 400_100),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert first and (first + out).decode() and b"Traceback" not in err  # whole characters only
    assert b"decode" in err


INTERRUPTED_WHILE_COMPILING = """
import os, signal, sys, threading
import jaxhybrid.generate
from jaxhybrid import engine

prefill = engine.prefill

def interrupted(*arguments):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    return prefill(*arguments)

engine.prefill = interrupted
sys.modules["jaxhybrid.generate"].entry()
"""


def test_ctrl_c_before_the_first_token(folder, tmp_path):
    """While XLA compiles, in threads that an orderly end of the interpreter would crash."""
    words = [sys.executable, "-c", INTERRUPTED_WHILE_COMPILING, "--model", folder, "--prompt", "a"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*words, "--max-tokens", "99999"], cwd=ROOT, env=environment, capture_output=True, timeout=120
    )
    # Python hears of the signal when XLA returns, by then the first tokens may be there
    assert done.returncode == 130 and len(done.stdout.decode()) < 100 and b"Traceback" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(folder):
    process = start(
        folder,
        *("--prompt", "hello", "--ignore-eos", "--max-tokens", 400_000, "--ctx", 400_100),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read().splitlines()
    # jaxlib 0.10.0 logs a line for every program that it takes from its own cache
    err = [line for line in err if b"cpu_aot_loader.cc" not in line]
    assert process.wait(timeout=120) == 0 and err == []


def test_a_conversation_on_a_terminal(folder, tmp_path):
    ours, theirs = pty.openpty()
    process = start(
        folder,
        *("--chat", "--max-tokens", 4),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "XDG_STATE_HOME": str(tmp_path)},
    )
    os.close(theirs)
    shown = bytearray()

    def read():
        try:
            while block := os.read(ours, 4096):
                shown.extend(block)
        except OSError:  # the other end is closed
            pass

    def until(text, count=1):
        deadline = time.monotonic() + 120
        while shown.count(text) < count:
            assert time.monotonic() < deadline, bytes(shown)
            time.sleep(0.05)

    reader = threading.Thread(target=read)
    reader.start()
    until(b"> ")
    os.write(ours, b"hi\n")
    until(b"recurrent cache")
    os.write(ours, b"\x1b[200~pasted\nlines\x1b[201~\n")  # as terminals mark what is pasted
    until(b"recurrent cache", 2)
    until(b"> ", 3)
    os.write(ours, b"\x04")
    assert process.wait(timeout=60) == 0
    reader.join()
    os.close(ours)
    assert shown.count(b"decode 4 tokens") == 2 and b"Traceback" not in shown
    assert (tmp_path / "jaxhybrid" / "history").read_text() == "hi\npasted\nlines\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_the_caller_has_closed(run, folder, monkeypatch, stream):
    monkeypatch.setattr(sys, stream, None)  # as Python starts after >&- or 2>&-
    code, out, err = run("--model", folder, "--prompt", "a", "--max-tokens", 1)
    assert code == 0 and bool(out) is (stream == "stderr") and "error" not in err

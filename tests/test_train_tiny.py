"""The training script: a few steps, an interruption, the exported folder."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxhybrid as jh

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import tiny_text  # noqa: E402
import train_tiny  # noqa: E402

SMALL = ["--micro", "--batch", "2", "--length", "32", "--vocab", "280", "--steps", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences that can be learnt, in a few documents."""
    words = "the cat sat on a mat and saw seven grey geese fly over one green hill".split()
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(words, 12)) + "." for _ in range(400)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def train(text, out, *more):
    return train_tiny.main(["--out", str(out), "--text", str(text), *SMALL, *more])


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "whole"
    assert train(text, out) == 0
    return out


def test_the_export_generates(finished):
    model = jh.load(finished / "model")
    result = jh.generate(model, "the cat", max_tokens=5)
    assert len(result.tokens) == 5 and model.params.hparams.is_hybrid
    report = json.loads((finished / "report.json").read_text())
    assert 0 < report["held-out bits per byte"] < math.log2(256) + 1
    card = (finished / "model" / "README.md").read_text()
    assert f"{report['held-out bits per byte']:.3f} bits" in card and "**In the beginning**" in card
    chat = model.tokenizer.encode_chat([{"role": "user", "content": "a"}])
    assert chat == [1, *model.tokenizer.encode("a"), 2]


def test_a_resumed_run_gives_the_same_bits(text, finished, tmp_path):
    out = tmp_path / "parts"
    assert train(text, out, "--stop-at", "2") == 0
    assert not (out / "model").exists()
    assert train(text, out, "--resume") == 0
    name = "model/model.safetensors"
    assert (out / name).read_bytes() == (finished / name).read_bytes()


def test_an_interrupt_saves_and_says_how_to_go_on(text, tmp_path):
    out = tmp_path / "interrupted"
    words = [sys.executable, str(SCRIPTS / "train_tiny.py"), "--out", str(out), "--text", str(text)]
    words += [*SMALL[:-1], "100000", "--save-every", "50000"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    line = process.stderr.readline()
    while b"cpu_aot_loader.cc" in line:  # jaxlib 0.10.0 logs its own cached programs
        line = process.stderr.readline()
    assert line.startswith(b"step 20/100000  loss ")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and b"go on with --resume" in err and b"Traceback" not in err
    saved = [int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit()]
    assert len(saved) == 1 and saved[0] >= 20


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "add --resume"),
        (["--resume", "--seed", "1"], "--seed is 1, but the run .* has 0"),
    ],
)
def test_a_run_is_not_overwritten_or_mixed(text, finished, more, message):
    before = (finished / "settings.json").read_bytes()
    with pytest.raises(SystemExit, match=message):
        train(text, finished, *more)
    assert (finished / "settings.json").read_bytes() == before


def test_wrong_texts_are_named(tmp_path):
    with pytest.raises(SystemExit, match="holds no run to resume"):
        train_tiny._check_folder(tmp_path / "new", {}, resume=True)
    (tmp_path / "short").write_text("one line\n")
    (tmp_path / "latin").write_bytes(b"\xff\n")
    for name, message in (("short", "too short"), ("latin", "utf-8"), ("absent", "No such file")):
        with pytest.raises(SystemExit, match=message):
            tiny_text.documents_of(tmp_path / name)


def test_held_out_text_is_never_trained_on(text):
    training, held_out = tiny_text.split(tiny_text.documents_of(text, size=300))
    learnt = "".join(tiny_text.training_texts(training))
    assert held_out and all(document.sentences[0] not in learnt for document in held_out)


def test_a_conversation_alternates():
    document = tiny_text.Document("T", ("a", "b", "c", "d", "e"))
    assert document.conversation == (
        "<|user|>a<|assistant|>b<|endoftext|><|user|>c<|assistant|>d<|endoftext|>"
    )
    assert document.prose == "T\n\na b c d e\n<|endoftext|>"


def test_held_out_windows_count_every_token_once(text):
    data = train_tiny.Data(str(text), 280)
    windows = list(data.windows(3, 50))
    counted = np.concatenate([tokens[:, 1:][counts] for tokens, counts in windows])
    np.testing.assert_array_equal(counted, data.held_out)

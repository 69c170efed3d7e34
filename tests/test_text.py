"""Tokenizers, the text stream and stop strings."""

import json
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from unittest.mock import Mock

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxhybrid import text as module
from jaxhybrid.errors import TokenizerError, UsageError
from jaxhybrid.text import BROKEN, Tokenizer
from jaxhybrid.text_stream import StopStrings, TextStream

pytestmark = pytest.mark.quick

TEXT = "na\u00efve \u65e5\u672c \U0001f600 e\u0301! \ufffd a"


@cache
def byte_level() -> Tokenizer:
    folder = Path(mkdtemp())
    tiny.write_folder(folder)
    return Tokenizer.load(folder)


@cache
def byte_fallback() -> Tokenizer:
    """As SentencePiece writes them: a space is \u2581, unknown characters are raw bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "\u00ef", "\u65e5", "\u2581b", "!", BROKEN]
    backend = Backend(
        models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder = Path(mkdtemp())
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150)
def test_the_pieces_of_any_tokens_add_up_to_their_text(kind, data):
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@given(text=st.text(max_size=20))
@example(text=TEXT)
@settings(max_examples=100)
def test_no_piece_is_half_a_character(text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream, said = TextStream(tokenizer), ""
    for token in ids:
        said += stream.push(token)
        assert text.startswith(said)
    assert said + stream.finish() == text


def test_a_long_text_is_encoded_piece_by_piece(monkeypatch):
    words = "ab abc b c a\n \n\nca  cab   abba " + TEXT
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator([words * 3], trainers.BpeTrainer(vocab_size=100, show_progress=False))
    llama = Backend(models.BPE(byte_fallback=True))  # a text is one word, which begins with a space
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    llama.train_from_iterator([words * 3], trainers.BpeTrainer(vocab_size=100, show_progress=False))
    monkeypatch.setattr(module, "PIECE", 200)
    monkeypatch.setattr(module, "OVERLAP", 100)
    random = Random(0)
    for tokenizer in (Tokenizer(trained), Tokenizer(llama), byte_level()):
        for n in (0, 1, 199, 200, 201, 1234):
            text = "".join(random.choices(words, k=n))
            whole = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.encode_long(text).tolist() == whole
        with monkeypatch.context() as patch:
            encode = Mock(wraps=tokenizer.backend.encode)
            patch.setattr(tokenizer, "backend", Mock(encode=encode))
            assert tokenizer.encode_long(text).tolist() == whole
            assert max(len(call.args[0]) for call in encode.call_args_list) == 200
        run = "a" * 777  # pieces may have nothing in common
        assert tokenizer.encode_long(run).tolist() == tokenizer.encode(run, add_special_tokens=False)
    with pytest.raises(UsageError, match="not valid Unicode at character 300"):
        tokenizer.encode_long("a" * 300 + "\ud800" + "b" * 300)


def test_special_tokens_are_silent_and_known():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|user|>hi<|assistant|>")
    assert ids[0] == tokenizer.special_id("<|user|>") == 1
    assert tokenizer.decode(ids) == "hi" and tokenizer.special_id("h") is None
    assert tokenizer.special_id("no such token") is None
    with pytest.raises(UsageError, match="out of range"):
        tokenizer.decode([-1])


@pytest.mark.parametrize(
    ("files", "bos", "eos"),
    [
        ({}, None, {0}),  # eos_token of tokenizer_config.json
        ({"config.json": {"eos_token_id": 5, "bos_token_id": 4}}, 4, {5}),
        (
            {"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [6, 7]}},
            None,
            {6, 7},
        ),
    ],
)
def test_where_the_end_of_text_comes_from(tmp_path, files, bos, eos):
    tiny.write_folder(tmp_path)
    for name, values in files.items():
        old = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        (tmp_path / name).write_text(json.dumps(old | values))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_id == bos and tokenizer.eos_ids == eos


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "[]", "not an object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "must be a token id"),
        ("chat_template.jinja", "{% if %}", "is wrong in line 1"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, message):
    tiny.write_folder(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_chat(tmp_path):
    tokenizer = byte_level()
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert tokenizer.apply_chat_template(talk, add_generation_prompt=False) == "<|user|>hi<|assistant|>yo"
    assert tokenizer.apply_chat_template(talk[:1]).endswith("<|assistant|>")
    with pytest.raises(TokenizerError, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    with pytest.raises(UsageError, match="message 0"):
        tokenizer.apply_chat_template(["hi"])  # type: ignore[list-item]
    with pytest.raises(TokenizerError, match="has no chat template"):
        byte_fallback().apply_chat_template(talk)


# ------------------------------------------------------------------------------------ stop strings

stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)
pieces = st.lists(st.text("abc", max_size=5), max_size=8)


def cut(text, strings):
    """The text before the stop string that is complete first; whether there is one."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@given(strings=stops, pieces=pieces)
@settings(max_examples=300)
def test_stop_strings_cut_the_same_however_text_arrives(strings, pieces):
    stop, said, stopped = StopStrings(strings), "", False
    for piece in pieces:
        new, stopped = stop.push(piece)
        said += new
        if stopped:
            break
    said += "" if stopped else stop.finish()
    assert (said, stopped) == cut("".join(pieces), strings)


def test_text_is_held_only_while_it_may_become_a_stop_string():
    stop = StopStrings(["END"])
    assert stop.push("abE") == ("ab", False)
    assert stop.push("x") == ("Ex", False)
    assert stop.push("EN") == ("", False)
    assert stop.push("Dmore") == ("", True)
    assert StopStrings([]).push("all") == ("all", False)
    with pytest.raises(UsageError, match="stop string is empty"):
        StopStrings(["a", ""])

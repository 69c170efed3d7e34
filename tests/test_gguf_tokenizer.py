"""Tokenizers written to GGUF files and read from them."""

import re
from pathlib import Path

import jax
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

import jaxhybrid as jh
from jaxhybrid.chat import ChatTemplate
from jaxhybrid.errors import CheckpointError, TokenizerError
from jaxhybrid.families import hparams_from_config
from jaxhybrid.files import write_gguf
from jaxhybrid.files.gguf.tokenizer import SPLITS
from jaxhybrid.model import init_params
from jaxhybrid.text import Tokenizer

EMBEDDED = Path(jh.__file__).parent / "models" / "tiny"
LLAMA = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 8, "vocab_size": 600, "tie_word_embeddings": True,
}  # fmt: skip
TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "  two  spaces, 12345 digits\n\n\tand a tab; don't WE'LL",
    "naïve Čeština 漢字 かな 한국어 🙂👩‍🚀 \u0301combining",
    "<s>specials</s> in the text <tool>",
    "",
    " ",
    "\n",
]
CORPUS = [" ".join(p.read_text() for p in sorted(Path(__file__).parent.glob("test_*.py"))[:12])]


def again(tokenizer, tmp_path, **fields):
    params = init_params(hparams_from_config(LLAMA | fields), jax.random.key(0))
    write_gguf(params, tmp_path / "model.gguf", tokenizer=tokenizer)
    return Tokenizer.load(tmp_path / "model.gguf")


def special(names=("<s>", "</s>", "<unk>")):
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_level(splits):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=580, special_tokens=special(), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def sentencepiece(prefix):
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + spaces)
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=pieces, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    described = backend.to_str()
    kept = re.sub(r'\{[^{}]*"content":"<0x[^{}]*\},?', "", described).replace("},]", "}]")
    backend = tokenizers.Tokenizer.from_str(kept)
    backend.pre_tokenizer = None  # SentencePiece merges over the whole text, and no token has a space inside
    shown = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(shown + [decoders.Strip(" ", 1, 0)] * prefix)
    return backend


def assert_equal(found, expected):
    for text in TEXTS:
        for add in (True, False):
            ids = expected.encode(text, add)
            assert found.encode(text, add) == ids, text
            assert found.decode(ids) == expected.decode(ids), text
    assert found.eos_ids == expected.eos_ids and found.bos_id == expected.bos_id


@pytest.mark.parametrize("splits", SPLITS.values(), ids=[names[0] for names in SPLITS])
def test_byte_level_tokenizers(splits, tmp_path):
    backend = byte_level(splits)
    bos = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer(
        backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, bos_id=bos, eos_ids=[1]
    )
    assert_equal(again(tokenizer, tmp_path), tokenizer)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers(prefix, tmp_path):
    tokenizer = Tokenizer(
        sentencepiece(prefix),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        bos_id=1,
        eos_ids=[2],
    )
    found = again(tokenizer, tmp_path)
    assert_equal(found, tokenizer)
    assert found.is_byte(3) and not found.is_byte(300)


def test_what_released_tokenizers_have_beside_their_merges(tmp_path):
    """A space put first by the pre-tokenizer (Mistral), splits at spaces that are gone (Gemma), added tokens
    beyond the embeddings (Gemma), NFC (Qwen)."""
    ids = {"bos_id": 1, "eos_ids": [2], "special_tokens": {"unk_token": "<unk>"}}
    mistral = sentencepiece(True)
    mistral.normalizer = None
    mistral.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)
    assert_equal(again(Tokenizer(mistral, **ids), tmp_path), Tokenizer(sentencepiece(True), **ids))
    gemma = sentencepiece(False)
    gemma.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    before = Tokenizer(gemma, **ids)
    size = before.vocab_size
    assert gemma.add_special_tokens(["<image>"]) == 1
    found = again(Tokenizer(gemma, **ids), tmp_path, vocab_size=size)
    assert found.token_id("<image>") is None and found.vocab_size == size
    assert_equal(found, Tokenizer(sentencepiece(False), **ids))
    qwen = byte_level(SPLITS[("qwen35",)])
    qwen.normalizer = normalizers.NFC()
    assert again(Tokenizer(qwen), tmp_path).encode("é") == Tokenizer(qwen).encode("é")


def test_the_embedded_model_as_a_file_talks_the_same(tmp_path):
    model = jh.load()
    path = tmp_path / "tiny.gguf"
    write_gguf(model.params, path, tokenizer=model.tokenizer, dtype="BF16")
    found = jh.load(path)
    assert_equal(found.tokenizer, model.tokenizer)
    messages = [{"role": "user", "content": "Who made the heaven?"}]
    assert found.tokenizer.encode_chat(messages) == model.tokenizer.encode_chat(messages)


def test_templates_are_kept_by_name(tmp_path):
    sources = {"default": "{{ messages[0].content }}", "tool_use": "tools: {{ messages[0].content }}"}
    tokenizer = Tokenizer(byte_level(SPLITS[("qwen35",)]), chat_template=ChatTemplate(sources, "here"))
    found = again(tokenizer, tmp_path)
    assert found.chat_templates == sources


def test_what_the_format_cannot_say_is_refused(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(CheckpointError, match="WordLevel"):
        again(Tokenizer(words), tmp_path)
    backend = byte_level(SPLITS[("qwen35",)])
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(CheckpointError, match="Whitespace"):
        again(Tokenizer(backend), tmp_path)
    backend = byte_level(SPLITS[("qwen35",)])
    backend.normalizer = normalizers.Lowercase()
    with pytest.raises(CheckpointError, match="the normalizer 'Lowercase'"):
        again(Tokenizer(backend), tmp_path)
    backend = sentencepiece(False)
    backend.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    with pytest.raises(CheckpointError, match="Digits.*before SentencePiece's merges"):
        again(Tokenizer(backend), tmp_path)
    with pytest.raises(CheckpointError, match="do not belong together"):
        again(Tokenizer(byte_level(SPLITS[("qwen35",)])), tmp_path, vocab_size=100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, expected",
    [
        ((b"qwen35", b"qwenXX"), "way of splitting"),
        ((b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0t5t5"), "not supported, only gpt2"),
        ((b"tokenizer.ggml.merges", b"tokenizer.ggml.mergex"), "no merges"),
        ((b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenx"), "has no tokenizer"),
    ],
)
def test_a_tokenizer_of_no_use_is_one_line(change, expected, tmp_path):
    again(Tokenizer(byte_level(SPLITS[("qwen35",)])), tmp_path)
    path = tmp_path / "model.gguf"
    data = path.read_bytes()
    assert change[0] in data
    path.write_bytes(data.replace(*change))
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer.load(path)
    assert jh.load_params(path).hparams.vocab_size == 600  # token ids still work

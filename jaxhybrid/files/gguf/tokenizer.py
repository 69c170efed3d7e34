"""The tokenizer and chat template that a GGUF file holds.

Two kinds: "gpt2", byte-level BPE with a list of merges and a named way of splitting text, and "llama",
SentencePiece's BPE, whose merges follow from the scores of the tokens. Facts: llama.cpp's vocabulary code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxhybrid.chat import ChatTemplate, one_line
from jaxhybrid.errors import TokenizerError
from jaxhybrid.files.config import show
from jaxhybrid.files.gguf.container import open_container
from jaxhybrid.text import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens in tokenizer.ggml.token_type."""

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_CASED = f"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*"
_CASED_SHORT = f"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}?|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}?"
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_NOT_HAN = _CASED_SHORT.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")

SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe"): (
        _LLAMA3,
    ),
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"): (_GPT2,),
    ("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"): (_QWEN2,),
    ("qwen35",): (
        _SHORT
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ("tekken",): (_CASED + r"|\p{N}" + _SLASHED,),
    ("gpt-4o", "llama4", "minimax-m2"): (_CASED_SHORT + r"|\p{N}{1,3}" + _SLASHED,),
    ("kimi-k2",): (r"[\p{Han}]+|" + _NOT_HAN + r"|\p{N}{1,3}" + _REST,),
    ("bailingmoe", "bailingmoe2"): (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
"""How text is split before merging, by names in files: each expression in the pieces of the one before."""

_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
"""Splits whose words are looked up whole before they are merged, and which begin texts with BOS."""

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>", "<|end_of_text|>", "<end_of_utterance>", "[EOS]", "[EOT]", "</s>",
)  # fmt: skip
"""Control tokens that end a turn or a text in llama.cpp whatever the metadata says."""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a file; TokenizerError when it has none, or one of a kind that is not known."""
    return _Reader(path).tokenizer()


def has_tokenizer(path: Path) -> bool:
    """Whether a file says that it has one, of whatever kind."""
    return open_container(path).metadata.get("tokenizer.ggml.model") not in _NONE


_NONE = (None, "none", "no_vocab")


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path, self.metadata = path, open_container(path).metadata

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not isinstance(value, kind):
            raise self.fail(f"tokenizer.ggml.{key} is {show(str(value))}, expected is {kind.__name__}")
        return value

    def fail(self, problem: str, remedy: str = "convert it again") -> TokenizerError:
        return TokenizerError(f"{self.path}: {problem}: {remedy}")

    def tokenizer(self) -> Tokenizer:
        kind = self.get("model", str)
        self.tokens = self.get("tokens", list)
        if kind in _NONE or not self.tokens:
            raise self.fail("has no tokenizer", "give token ids, or use a file made with the tokenizer")
        types = self.get("token_type", np.ndarray)
        self.types = [NORMAL] * len(self.tokens) if types is None else types.tolist()
        if len(self.types) != len(self.tokens):
            raise self.fail(f"{len(self.types)} token types for {len(self.tokens)} tokens")
        self.ids = {text: i for i, text in enumerate(self.tokens)}
        builders = {"gpt2": self.byte_level, "llama": self.sentencepiece}
        if kind not in builders:
            raise self.fail(f"tokenizer {show(kind)} is not supported, only gpt2 and llama", "give token ids")
        try:
            backend = builders[kind]()
        except TokenizerError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise self.fail(f"its tokenizer cannot be used ({one_line(error)})") from error
        self.add_special(backend)
        bos, eos = self.token("bos"), self.token("eos")
        begins = self.get("add_bos_token", bool, kind == "llama" or self.get("pre", str) in _WHOLE_WORDS)
        ends = self.get("add_eos_token", bool, False)
        self.add_ends(backend, bos if begins else None, eos if ends else None)
        names = {f"{n}_token": t for n in ("bos", "eos", "unk", "pad") if (t := self.text(n)) is not None}
        return Tokenizer(
            backend,
            source=str(self.path),
            special_tokens=names,
            chat_template=self.template(),
            bos_id=bos,
            eos_ids=self.end_ids(),
        )

    def byte_level(self) -> tokenizers.Tokenizer:
        name = self.get("pre", str, "default")
        splits = next((split for names, split in SPLITS.items() if name in names), None)
        if splits is None:
            known = ", ".join(sorted(n for names in SPLITS for n in names))
            raise self.fail(
                f"its way of splitting text, {show(name)}, is not known, only {known}", "give token ids"
            )
        merges = self.get("merges", list)
        if merges is None:
            raise self.fail("its tokenizer has no merges")
        pairs = []
        for merge in merges:
            # a space inside a token is written as another character, so the only space separates
            left, space, right = merge[:1] + merge[1:].partition(" ")[0], *merge[1:].partition(" ")[1:]
            if not space or not right:
                raise self.fail(f"merge {show(merge)} is not two tokens")
            pairs.append((left, right))
        backend = tokenizers.Tokenizer(models.BPE(self.ids, pairs, ignore_merges=name in _WHOLE_WORDS))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        backend.decoder = decoders.ByteLevel()
        return backend

    def sentencepiece(self) -> tokenizers.Tokenizer:
        scores = self.get("scores", np.ndarray)
        if scores is None or len(scores) != len(self.tokens):
            raise self.fail("its tokenizer has no score for each token")
        backend = tokenizers.Tokenizer(
            models.BPE(
                self.ids,
                self.merges(scores),
                unk_token=self.text("unk"),
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        prefix = self.get("add_space_prefix", bool, True)
        spaces: list[Any] = [normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + spaces)
        shown: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(shown + [decoders.Strip(" ", 1, 0)] * prefix)
        return backend

    def merges(self, scores: np.ndarray) -> list[tuple[str, str]]:
        """Every way to make a token of two others, the best token first."""
        found: list[tuple[float, int, int, str, str]] = []
        ids, lengths = self.ids, {len(text) for text in self.tokens}
        for text, score, kind in zip(self.tokens, scores.tolist(), self.types, strict=True):
            if kind != NORMAL:
                continue
            for i in range(1, len(text)):
                if (
                    i not in lengths or len(text) - i not in lengths
                ):  # else a text of a megabyte takes an hour
                    continue
                left, right = text[:i], text[i:]
                if left in ids and right in ids:
                    found.append((-score, ids[left], ids[right], left, right))
        found.sort()
        return [(left, right) for *_, left, right in found]

    def add_special(self, backend: tokenizers.Tokenizer) -> None:
        for wanted, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
            add(
                [
                    AddedToken(text, normalized=False, special=wanted == CONTROL)
                    for text, kind in zip(self.tokens, self.types, strict=True)
                    if kind == wanted and text
                ]
            )

    def add_ends(self, backend: tokenizers.Tokenizer, bos: int | None, eos: int | None) -> None:
        found = [(self.tokens[i], i) for i in (bos, eos) if i is not None]
        if found:
            single: Sequence[str | None] = (
                None if bos is None else self.tokens[bos],
                "$A",
                None if eos is None else self.tokens[eos],
            )
            backend.post_processor = TemplateProcessing(
                single=[part for part in single if part], special_tokens=list(set(found))
            )

    def token(self, name: str) -> int | None:
        found = self.get(f"{name}_token_id", int)
        if found is not None and not 0 <= found < len(self.tokens):
            raise self.fail(f"tokenizer.ggml.{name}_token_id is {found}, there are {len(self.tokens)} tokens")
        return found

    def text(self, name: str) -> str | None:
        found = self.token({"unk": "unknown", "pad": "padding"}.get(name, name))
        return None if found is None else self.tokens[found]

    def end_ids(self) -> set[int]:
        found = {i for name in ("eos", "eot", "eom") if (i := self.token(name)) is not None}
        known = {i for text in _ENDS if (i := self.ids.get(text)) is not None and self.types[i] == CONTROL}
        return found | known

    def template(self) -> ChatTemplate | None:
        prefix = "tokenizer.chat_template"
        named = {"default": prefix} | {
            key.removeprefix(prefix + "."): key for key in self.metadata if key.startswith(prefix + ".")
        }
        sources = {name: self.metadata.get(key) for name, key in named.items()}
        texts = {name: source for name, source in sources.items() if isinstance(source, str)}
        return ChatTemplate(texts, str(self.path)) if "default" in texts else None

"""A tokenizer as the metadata of a GGUF file: the inverse of `tokenizer.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import show
from jaxhybrid.files.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from jaxhybrid.text import Tokenizer


def tokenizer_metadata(tokenizer: Tokenizer | None, vocab_size: int, path: Path) -> dict[str, Any]:
    """Entries of a file; CheckpointError for a tokenizer that the format has no words for."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    described = json.loads(tokenizer.backend.to_str())
    model = described["model"]
    if model.get("type") != "BPE":
        raise _fail(path, f"{show(str(model.get('type')))} tokenizers")
    if not model["merges"]:
        raise _fail(path, "a tokenizer without merges")
    added = {entry["id"]: entry for entry in described["added_tokens"]}
    # added tokens beyond the embeddings (of images, in Gemma's text models) can never be asked for
    texts = {i: text for text, i in tokenizer.backend.get_vocab().items() if i < vocab_size or i not in added}
    if max(texts, default=-1) >= vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has token {max(texts)}, the model {vocab_size} tokens; "
            "they do not belong together"
        )
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    pieces = model.get("byte_fallback", False)
    kinds = [
        UNUSED if i not in texts
        else (CONTROL if added[i]["special"] else USER_DEFINED) if i in added
        else UNKNOWN if pieces and texts[i] == model.get("unk_token")
        else BYTE if pieces and tokenizer.is_byte(i)
        else NORMAL
        for i in range(vocab_size)
    ]  # fmt: skip
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if pieces else "gpt2",
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(vocab_size)],
        "tokenizer.ggml.token_type": kinds,
    }
    if pieces:
        found |= _scores(merges, texts, vocab_size)
        found["tokenizer.ggml.add_space_prefix"] = _puts_space_first(described, path)
    else:
        found["tokenizer.ggml.pre"] = _split_name(described, path)
        found["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    return found | _special(tokenizer) | _templates(tokenizer)


def _scores(merges: list[tuple[str, ...]], texts: dict[int, str], vocab_size: int) -> dict[str, Any]:
    """A token is the better the earlier a merge makes it."""
    rank: dict[str, int] = {}
    for i, pair in enumerate(merges):
        rank.setdefault("".join(pair), i)
    return {
        "tokenizer.ggml.scores": [-float(rank.get(texts.get(i, ""), len(merges))) for i in range(vocab_size)]
    }


def _parts(described: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The normalizers or pre-tokenizers of a tokenizer, one after the other."""
    found = described.get(kind)
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[kind]
    return [] if not found else found[inner] if found["type"] == "Sequence" else [found]


def _puts_space_first(described: dict[str, Any], path: Path) -> bool:
    """Whether SentencePiece's tokens begin every text with a space."""
    first = False
    for part in (*_parts(described, "normalizer"), *_parts(described, "pre_tokenizer")):
        match part["type"]:
            case "Prepend" if part["prepend"] == "▁":
                first = True
            case "Metaspace" if not part["split"] and part["replacement"] == "▁":
                first = part["prepend_scheme"] != "never"
            case "Replace" if part["pattern"] == {"String": " "} and part["content"] == "▁":
                pass
            case "Split" if part["pattern"] == {"String": " "}:
                pass  # none is left by then
            case other:
                raise _fail(path, f"{show(str(other))} before SentencePiece's merges")
    return first


def _split_name(described: dict[str, Any], path: Path) -> str:
    """The name of the way in which a tokenizer splits text."""
    for part in _parts(described, "normalizer"):
        if part["type"] != "NFC":  # which llama.cpp leaves out
            raise _fail(path, f"the normalizer {show(part['type'])}")
    splits: list[str] = []
    for part in _parts(described, "pre_tokenizer"):
        match part["type"]:
            case "Split" if (part["behavior"], part["invert"]) in (("Isolated", False), ("Removed", True)):
                splits.append(part["pattern"].get("Regex", ""))
            case "Digits" if part["individual_digits"]:
                splits.append(r"\p{N}")
            case "ByteLevel" if part["use_regex"] and not part["add_prefix_space"]:
                splits.append(SPLITS[next(names for names in SPLITS if "gpt-2" in names)][0])
            case "ByteLevel" if not part["add_prefix_space"]:
                pass
            case other:
                raise _fail(path, f"the pre-tokenizer {show(str(other))}")
    name = next((names[0] for names, known in SPLITS.items() if known == tuple(splits)), None)
    if name is None:
        raise _fail(path, f"the split {show(str(splits))}")
    return name


def _special(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {"bos": tokenizer.bos_id}
    ends = sorted(tokenizer.eos_ids)
    named = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
    first = named if named in ends else next(iter(ends), None)
    ids |= {"eos": first, "eot": next((i for i in ends if i != first), None)}
    for name, long in (("unk", "unknown"), ("pad", "padding")):
        ids[long] = tokenizer.token_id(tokenizer.special_tokens.get(f"{name}_token", ""))
    found: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None}
    around = tokenizer.encode("")
    found["tokenizer.ggml.add_bos_token"] = tokenizer.bos_id is not None and tokenizer.bos_id in around[:1]
    found["tokenizer.ggml.add_eos_token"] = (
        first is not None
        and first in around[-1:]
        and len(around) > (1 if found["tokenizer.ggml.add_bos_token"] else 0)
    )
    return found


def _templates(tokenizer: Tokenizer) -> dict[str, str]:
    return {
        "tokenizer.chat_template" + ("" if name == "default" else f".{name}"): source
        for name, source in tokenizer.chat_templates.items()
    }


def _fail(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: GGUF files have no place for {what}; write the model without its tokenizer (--no-tokenizer)"
    )

"""Text to token ids and back."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers.processors import TemplateProcessing

from jaxhybrid.chat import ChatTemplate, one_line, read_chat_template, read_json
from jaxhybrid.errors import TokenizerError, UsageError
from jaxhybrid.files.config import atomic_path, write_json
from jaxhybrid.files.source import gguf_part, is_gguf

PIECE, OVERLAP = 1 << 18, 1 << 11
"""Characters that `encode_long` encodes at one time, for a tokenizer takes 200 bytes for each, and twice."""

AGREE = 16
"""Tokens on either side of a place where two pieces are joined."""

BROKEN = "\ufffd"
"""What decoding writes for bytes that are no character, or not yet one."""


class Tokenizer:
    """The tokenizer of a model folder in Hugging Face layout, or of a .gguf file; `load` makes one.

    `bos_id` (int or None) and `eos_ids` (frozenset of int) come from generation_config.json, else
    config.json, else the texts in tokenizer_config.json. `backend` is what does the work; `special_tokens`
    maps names such as "bos_token" to texts.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str = "this tokenizer",
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
    ):
        """`special_tokens` maps names such as "bos_token" to texts, for the chat template;
        `source` names the tokenizer in messages."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._source = source
        self._chat_template = chat_template
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Reads what a .gguf file holds, or tokenizer.json and, where there, tokenizer_config.json,
        special_tokens_map.json, generation_config.json, config.json, chat_template.jinja and
        chat_template.json.

        Raises TokenizerError that names the file and the remedy.
        """
        folder = Path(folder)
        if is_gguf(folder):
            return gguf_part("tokenizer").load_tokenizer(folder)
        file = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise TokenizerError(
                f"{folder} has no tokenizer.json: download it with the model, or make it from "
                "other tokenizer files with save_pretrained of transformers' AutoTokenizer"
            ) from error
        except Exception as error:  # tokenizers raises plain Exception
            raise TokenizerError(f"{file} cannot be read ({one_line(error)}): download it again") from error
        settings = read_json(folder / "tokenizer_config.json")
        special = _special_tokens(read_json(folder / "special_tokens_map.json"))
        special |= _special_tokens(settings)
        _follow_bos_eos_flags(backend, settings, special)
        bos_ids = _ids_in_configs(folder, "bos_token_id")
        eos_ids = _ids_in_configs(folder, "eos_token_id")
        bos_id = backend.token_to_id(special.get("bos_token", ""))
        eos_id = backend.token_to_id(special.get("eos_token", ""))
        return cls(
            backend,
            source=str(folder),
            special_tokens=special,
            chat_template=read_chat_template(folder, settings),
            bos_id=bos_ids[0] if bos_ids else bos_id,
            eos_ids=eos_ids or ([] if eos_id is None else [eos_id]),
        )

    def save(self, folder: str | Path) -> None:
        """Writes what `load` reads: tokenizer.json, tokenizer_config.json, the chat template and, where ids
        of BOS or of ends are known, generation_config.json. CheckpointError when a file cannot be written."""
        folder, templates = Path(folder), self.chat_templates
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if len(templates) > 1:
            settings["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
        files = {"tokenizer.json": self.backend.to_str(pretty=True)}
        if len(templates) == 1:
            files["chat_template.jinja"] = templates["default"]
        for name, text in files.items():
            with atomic_path(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8", newline="")
        write_json(folder / "tokenizer_config.json", settings)
        ids = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids) or None}
        if known := {name: value for name, value in ids.items() if value is not None}:
            write_json(folder / "generation_config.json", known)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def token_id(self, text: str) -> int | None:
        """The id of the token written exactly `text`, None when there is none."""
        return self.backend.token_to_id(text)

    def special_id(self, text: str) -> int | None:
        """The id of the special token written `text`, which `decode` leaves out; else None."""
        return self.token_id(text) if text in self._special_texts else None

    @property
    def prefix_id(self) -> int | None:
        """The token that stands where a text has nothing before it: BOS, or EOS where there is none."""
        named = [self.token_id(self.special_tokens.get(f"{name}_token", "")) for name in ("bos", "eos")]
        found = [*named, self.bos_id, *sorted(self.eos_ids)]
        return next((token for token in found if token is not None), None)

    @property
    def adds_bos(self) -> bool:
        """Whether `encode` puts BOS before a text."""
        return self.bos_id is not None and self.encode("")[:1] == [self.bos_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, BOS and the like where the model has
        them. Special tokens written out in the text become their ids."""
        _check_unicode(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_long(self, text: str) -> np.ndarray:
        """Token ids [N] int32 of `text` without special tokens, as `encode` gives them, in little memory.

        Pieces that overlap are encoded one after the other, and joined where both have the same tokens. Where
        they have none in common, as in a long run of one letter, the text is encoded as a whole.
        """
        _check_unicode(text)
        encode = partial(self.backend.encode, add_special_tokens=False)
        parts: list[np.ndarray] = []
        piece, first = encode(text[:PIECE]), 0
        for begin in range(PIECE - OVERLAP, len(text) - OVERLAP, PIECE - OVERLAP):
            after = encode(text[begin : begin + PIECE])
            met = _meeting(piece, after, PIECE - OVERLAP)
            if met is None:
                return np.asarray(encode(text).ids, np.int32)
            parts.append(np.asarray(piece.ids[first : met[0]], np.int32))
            piece, first = after, met[1]
        return np.concatenate([*parts, np.asarray(piece.ids[first:], np.int32)])

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know are left out, and bytes that
        are no character become U+FFFD."""
        ids = [_checked_id(i) for i in ids]
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The jinja sources by name, "default" among them; empty where there is none."""
        return {} if self._chat_template is None else dict(self._chat_template.sources)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt for a conversation: messages are mappings with "role" and "content"; `extra`
        (`tools=`, `enable_thinking=`) goes to the template.

        Raises TokenizerError when there is no template or it refuses, UsageError for messages of
        another form.
        """
        if self._chat_template is None:
            raise TokenizerError(
                f"{self._source} has no chat template: give a plain prompt, or add "
                "chat_template.jinja to its folder (python -m jaxhybrid.convert makes one of a .gguf file)"
            )
        names = self.special_tokens | extra | {"add_generation_prompt": add_generation_prompt}
        return self._chat_template.render(messages, names)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Token ids of a conversation; the template writes BOS where it wants one, so none is
        added."""
        text = self.apply_chat_template(messages, add_generation_prompt, **extra)
        return self.encode(text, add_special_tokens=False)

    def shows(self, token: int, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` writes anything for the token, rather than leaving it out."""
        text = self.backend.id_to_token(_checked_id(token))
        return text is not None and not (skip_special_tokens and text in self._special_texts)

    def is_byte(self, token: int) -> bool:
        """Whether the token is one raw byte, written like <0xFF> in SentencePiece vocabularies."""
        text = self.backend.id_to_token(_checked_id(token)) or ""
        return len(text) == 6 and text.startswith("<0x") and text.endswith(">")

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not valid Unicode at character {error.start}: give it as UTF-8"
        ) from error


def _meeting(before: tokenizers.Encoding, after: tokenizers.Encoding, shift: int) -> tuple[int, int] | None:
    """Tokens of two encodings, the second of which begins `shift` characters later, with the same tokens
    around them; None where there are none."""
    starts = {start + shift: j for j, (start, _) in enumerate(after.offsets)}
    for i in range(len(before.ids) - AGREE, AGREE, -1):
        j = starts.get(before.offsets[i][0], 0)
        if j >= AGREE and before.ids[i - AGREE : i + AGREE] == after.ids[j - AGREE : j + AGREE]:
            return i, j
    return None


def _checked_id(token: int) -> int:
    token = int(token)
    if not 0 <= token < 2**32:
        raise UsageError(f"token id {token} is out of range; ids are 0 to 2**32 - 1")
    return token


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Entries such as "eos_token", written as a text or as an object with its content."""
    extra = settings.get("extra_special_tokens")
    entries = {**(extra if isinstance(extra, dict) else {}), **settings}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in entries.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _follow_bos_eos_flags(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """As transformers 5 does, add_bos_token or add_eos_token in the settings, once there, decide
    what `encode` adds, whatever tokenizer.json says."""
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    wanted = {
        name: special[f"{name}_token"]
        for name in ("bos", "eos")
        if settings.get(f"add_{name}_token") and f"{name}_token" in special
    }
    ids = [(text, backend.token_to_id(text)) for text in wanted.values()]
    if all(token is not None for _, token in ids):
        single = [wanted.get("bos"), "$A", wanted.get("eos")]
        backend.post_processor = TemplateProcessing(
            single=[part for part in single if part], special_tokens=list(set(ids))
        )


def _ids_in_configs(folder: Path, field: str) -> list[int]:
    """A field that holds an id or a list of ids, from the first file that has it."""
    config = read_json(folder / "config.json")
    for name, values in (
        ("generation_config.json", read_json(folder / "generation_config.json")),
        ("config.json", config),
        ("config.json", config.get("text_config") or {}),
    ):
        value = values.get(field)
        ids: list[Any] = value if isinstance(value, list) else [value]
        if value is not None and ids:
            if not all(type(i) is int and i >= 0 for i in ids):
                raise TokenizerError(
                    f"{field} in {folder / name} is {value!r}: it must be a token id or a list"
                )
            return ids
    return []

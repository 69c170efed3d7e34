"""The text the bundled model learns: chapters as prose, some again as conversations, some held out."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
HOLD_OUT = 20
"""Every 20th document is never trained on."""
CONVERSE = 6
"""Every 6th document for training is read a second time, as a conversation."""


@dataclass(frozen=True)
class Document:
    title: str
    sentences: tuple[str, ...]

    @property
    def prose(self) -> str:
        heading = f"{self.title}\n\n" if self.title else ""
        return f"{heading}{' '.join(self.sentences)}\n{END}"

    @property
    def conversation(self) -> str:
        """Every other sentence is what the user says, the next is the answer."""
        pairs = zip(self.sentences[::2], self.sentences[1::2], strict=False)
        return "".join(f"{USER}{said}{ASSISTANT}{answer}{END}" for said, answer in pairs)


def bible() -> list[Document]:
    """The chapters of the King James Version, as Debian's package bible-kjv prints them."""
    if shutil.which("bible") is None:
        raise SystemExit(
            "train_tiny: no command bible: install Debian's package bible-kjv, or give --text FILE"
        )
    command = ["bible", "-l9999", "Gen1:1-Rev22:21"]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
    ).stdout
    chapters: list[tuple[str, list[str]]] = []
    for line in filter(str.strip, printed.splitlines()):
        verse = re.fullmatch(r"  \d+ (.*)", line)
        if verse:
            chapters[-1][1].append(verse[1].strip())
        else:
            chapters.append((line.strip(), []))
    return [Document(title, tuple(verses)) for title, verses in chapters]


def documents_of(path: Path, size: int = 4000) -> list[Document]:
    """A text file in documents of about `size` characters, cut between lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"train_tiny: --text {path}: {error}") from error
    documents, lines, length = [], [], 0
    for line in filter(str.strip, text.splitlines()):
        lines.append(line.strip())
        length += len(line)
        if length >= size:
            documents.append(Document("", tuple(lines)))
            lines, length = [], 0
    if lines:
        documents.append(Document("", tuple(lines)))
    if len(documents) < 2:
        raise SystemExit(f"train_tiny: --text {path}: too short, {2 * size} characters are needed")
    return documents


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(for training, held out); the middle one of every `HOLD_OUT` is held out, at least one."""
    middle = min(HOLD_OUT, len(documents)) // 2
    held_out = [d for i, d in enumerate(documents) if i % HOLD_OUT == middle]
    return [d for i, d in enumerate(documents) if i % HOLD_OUT != middle], held_out


def training_texts(documents: list[Document]) -> list[str]:
    return [d.prose for d in documents] + [d.conversation for d in documents[::CONVERSE]]

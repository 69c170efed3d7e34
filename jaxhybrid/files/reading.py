"""Bytes of a file whose header was read before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxhybrid.errors import CheckpointError
from jaxhybrid.files.config import show, unreadable
from jaxhybrid.files.header import AGAIN


@contextmanager
def unchanged(path: Path, n_bytes: int, begin: int, whole: str) -> Iterator[Any]:
    """Yields the unbuffered file at byte `begin`; CheckpointError when it cannot be read or has no longer
    n_bytes. whole: what nobody may write to meanwhile, "it" or "its folder"."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != n_bytes:
                raise CheckpointError(
                    f"{path}: changed from {n_bytes} to {size} bytes since it was checked; load the model "
                    f"when nothing writes to {whole}"
                )
            file.seek(begin)
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def fill(file: Any, buffer: memoryview, path: Path, tensor: str) -> None:
    """Read until the buffer of bytes is full; CheckpointError, which names the tensor, when the file ends."""
    while buffer:
        n = file.readinto(buffer)
        if not n:
            raise CheckpointError(f"{path}: ends inside tensor {show(tensor)}; {AGAIN}")
        buffer = buffer[n:]

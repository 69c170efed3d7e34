"""From what a user calls a model, a folder or a hub id, to a folder on this machine."""

import errno
import glob
import os
import re
from pathlib import Path

from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.files.config import holds, show
from jaxhybrid.files.source import is_gguf
from jaxhybrid.files.tensors import find_files

# What a model folder needs; weights in other formats and in subfolders stay on the hub.
WANTED = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
]
UNWANTED = ["*/*", "consolidated*", "adapter_*"]

_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_HUB_FILE = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/((?:\w[^/]*/)*\w[^/]*\.gguf)", re.ASCII | re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_FILE_NAME = re.compile(r".+\.(gguf|safetensors|bin|pt|pth|json|npz)", re.IGNORECASE)


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
) -> Path:
    """The folder of `model`: an existing folder or .gguf file as it is, a hub id through the hub's cache. A
    hub id may go on with a .gguf file of the repository, owner/name/FILE.gguf, which is then the result; a
    part of a split file brings the others.

    `revision` is a branch, tag or commit of a hub id. `offline=True` uses the cache alone, None
    leaves that to HF_HUB_OFFLINE. When the hub cannot be reached, a complete copy in the cache
    serves. `progress` shows the hub library's bars on a terminal.

    Raises CheckpointError when there is no such folder or repository, when access is refused, and
    when the files can be neither downloaded nor found complete in the cache; UsageError for a
    revision of a local folder.
    """
    name = os.fspath(model)
    path = os.path.expanduser(name)
    if os.path.isdir(path) or os.path.isfile(path) and is_gguf(Path(path)):
        if revision is not None:
            raise UsageError(f"{show(name)}: a local folder or file has no revision; leave it out")
        return Path(path)
    if os.path.exists(path):
        raise CheckpointError(
            f"{show(name)}: is a file; give a .gguf file, or the folder of config.json and .safetensors files"
        )
    if "://" in name:
        raise CheckpointError(f"{show(name)}: is an address; give the hub id alone, owner/name")
    if named := _HUB_FILE.fullmatch(name):
        return _snapshot(named[1], revision, offline is True, progress, named[2])
    if not _HUB_ID.fullmatch(name) or _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{show(name)}: file or folder not found; give a model folder, or a hub id such as owner/name"
        )
    return _snapshot(name, revision, offline is True, progress)


def _snapshot(
    name: str, revision: str | None, offline: bool, progress: bool, file: str | None = None
) -> Path:
    """The folder of a repository with what a model needs, or `file` of it."""
    # Imported late: a local folder needs none of it, and it takes a while.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import utils as hub_utils

    def fetch(local_files_only: bool) -> Path:
        folder = snapshot_download(
            name,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=WANTED if file is None else [_PART.sub(r"-?????-of-\1.gguf", glob.escape(file))],
            ignore_patterns=UNWANTED if file is None else None,
        )
        return _checked(name, Path(folder)) if file is None else _checked_file(name, Path(folder), file)

    hide = not progress and not hub_utils.are_progress_bars_disabled()
    if hide:
        hub_utils.disable_progress_bars()
    try:
        return fetch(offline)
    except CheckpointError:
        raise
    # The library lets through errors of several HTTP stacks, which differ between its versions.
    except Exception as error:
        refusal = _refusal(name, revision, error)
        if refusal:
            raise CheckpointError(f"{show(name)}: {refusal}") from error
        try:
            return fetch(True)
        except Exception:
            pass
        if offline or constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{show(name)}: not complete in the cache {constants.HF_HUB_CACHE}; "
                "run once with the network (without HF_HUB_OFFLINE)"
            ) from error
        raise CheckpointError(
            f"{show(name)}: cannot be downloaded from {constants.ENDPOINT} ({_reason(error)}) and "
            "is not complete in the cache; check the network, or give a local folder"
        ) from error
    finally:
        if hide:
            hub_utils.enable_progress_bars()


def _checked(name: str, folder: Path) -> Path:
    """`folder`, if it holds a configuration and all weights that its index asks for."""
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise CheckpointError(
                f"{show(name)}: has no {pattern} (the download holds {holds(folder)}); "
                "choose a repository with a model in safetensors format, or a file, owner/name/FILE.gguf"
            )
    try:
        find_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{show(name)}: the download is not usable: {error}") from error
    return folder


def _checked_file(name: str, folder: Path, file: str) -> Path:
    if not (folder / file).is_file():
        raise CheckpointError(f"{show(name)}: has no file {show(file)}; give one of its .gguf files")
    return folder / file


def _refusal(name: str, revision: str | None, error: BaseException | None) -> str | None:
    """Why trying again, or in the cache, is of no use, with the remedy; None for a bad network."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):  # "not in the cache", because of ...
        return _refusal(name, revision, error.__cause__)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"access is restricted; ask for it at {constants.ENDPOINT}/{name}, "
            "then log in with `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no folder of this name, and no such model at {constants.ENDPOINT}; check the "
            "spelling, or log in with `hf auth login` if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision {show(revision or 'main')}; give one of its branches or tags"
    if isinstance(error, errors.HFValidationError):
        return "folder not found, and not a valid hub id; give a model folder, or owner/name"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"access refused ({_reason(error)}); log in with `hf auth login`"
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
        remedy = "free some space, or set HF_HOME to a folder on a larger disk"
        return f"disk full while downloading to {constants.HF_HUB_CACHE}; {remedy}"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission in {constants.HF_HUB_CACHE}; set HF_HOME to a writable folder"
    return None


def _reason(error: BaseException) -> str:
    """The root of a library error, as one short line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__

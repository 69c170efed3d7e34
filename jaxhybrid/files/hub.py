"""From what a user calls a model, a folder or a hub id, to a folder on this machine."""

import errno
import os
import re
from dataclasses import dataclass
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
UNWANTED = ["*/*", "consolidated*", "adapter_*", "model.*.safetensors"]  # the last: variants, such as fp16

_HUB_ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_FILE_NAME = re.compile(r".+\.(gguf|safetensors|bin|pt|pth|json|npz)", re.IGNORECASE)


@dataclass(frozen=True)
class HubName:
    """What a hub name means. revision: a branch, tag or commit. gguf: a .gguf file of the repository, or what
    the name of one contains, such as Q4_K_M."""

    repo: str
    revision: str | None = None
    gguf: str | None = None

    @staticmethod
    def parse(name: str) -> "HubName | None":
        """owner/name, owner/name@revision, owner/name/file.gguf, owner/name:Q4_K_M; None for others."""
        rest, at, revision = name.partition("@")
        if ":" in rest:
            repo, _, gguf = rest.partition(":")
        elif rest.lower().endswith(".gguf") and rest.count("/") > 1:
            owner, repo, gguf = rest.split("/", 2)
            repo = f"{owner}/{repo}"
        else:
            repo, gguf = rest, None
        wrong_file = gguf is not None and (not gguf or ".." in gguf or "\\" in gguf or not gguf.isprintable())
        wrong_revision = at and not re.fullmatch(r"\w[\w./-]*", revision, re.ASCII)
        if not _HUB_ID.fullmatch(repo) or _FILE_NAME.fullmatch(repo) or wrong_file or wrong_revision:
            return None
        return HubName(repo, revision or None, gguf)


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    offline: bool | None = None,
    progress: bool = True,
) -> Path:
    """The folder of `model`: an existing folder or .gguf file as it is, a hub id through the hub's cache.

    A hub id is owner/name; `@revision` behind it is a branch, tag or commit, as is `revision`. A .gguf file
    of a repository is named owner/name/file.gguf, or by a part of its name: owner/name:Q4_K_M. `offline=True`
    uses the cache alone, None leaves that to HF_HUB_OFFLINE. When the hub cannot be reached, a complete copy
    in the cache serves. A download goes on where the connection was lost, and keeps the files that are
    complete when it is ended. `progress` shows the hub library's bars on a terminal.

    Raises CheckpointError when there is no such folder or repository, when access is refused, and
    when the files can be neither downloaded nor found complete in the cache; UsageError for a
    revision of a local folder, or two of them.
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
    wanted = HubName.parse(name)
    if wanted is None:
        raise CheckpointError(
            f"{show(name)}: file or folder not found; give a model folder, or a hub id such as owner/name"
        )
    if revision is not None and wanted.revision is not None:
        raise UsageError(f"{show(name)}: has a revision already; leave {show(revision)} out")
    return _snapshot(
        HubName(wanted.repo, wanted.revision or revision, wanted.gguf), offline is True, progress
    )


def _snapshot(wanted: HubName, offline: bool, progress: bool) -> Path:
    # Imported late: a local folder needs none of it, and it takes a while.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub import utils as hub_utils

    name = wanted.repo

    def fetch(local_files_only: bool) -> Path:
        patterns, unwanted = WANTED, UNWANTED
        if wanted.gguf is not None:
            patterns, unwanted = _gguf_files(wanted, local_files_only), []
        folder = snapshot_download(
            name,
            revision=wanted.revision,
            local_files_only=local_files_only,
            allow_patterns=patterns,
            ignore_patterns=unwanted,
        )
        if wanted.gguf is None:
            return _checked(wanted, Path(folder))
        return _checked_gguf(wanted, Path(folder), patterns)

    hide = not progress and not hub_utils.are_progress_bars_disabled()
    if hide:
        hub_utils.disable_progress_bars()
    try:
        return fetch(offline)
    except CheckpointError:
        raise
    # The library lets through errors of several HTTP stacks, which differ between its versions.
    except Exception as error:
        refusal = _refusal(name, wanted.revision, error)
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


def _gguf_files(wanted: HubName, offline: bool) -> list[str]:
    """The file of a repository that is meant, with all its shards."""
    from huggingface_hub import HfApi, snapshot_download

    assert wanted.gguf is not None
    if offline:
        there = snapshot_download(
            wanted.repo, revision=wanted.revision, local_files_only=True, allow_patterns=[]
        )  # asking for no file: the library refuses a folder where one that is asked for is missing
        folder = Path(there)
        names = [p.relative_to(folder).as_posix() for p in folder.rglob("*.[gG][gG][uU][fF]")]
    else:
        found = HfApi().list_repo_files(wanted.repo, revision=wanted.revision)
        names = [file for file in found if file.lower().endswith(".gguf")]
    part = wanted.gguf.lower()
    if part.endswith(".gguf"):
        meant = [n for n in names if n.lower() == part]
    else:  # a part that stands by itself: Q4_K is not in Q4_K_M
        alone = re.compile(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9_])")
        meant = [n for n in names if alone.search(n.lower())]
    whole = {_SHARD.sub("", n) for n in meant}
    if len(whole) != 1:
        there = ", ".join(show(n) for n in sorted(meant or names)[:4]) or "no .gguf file"
        several = "several files are" if whole else "no file is"
        raise CheckpointError(
            f"{show(wanted.repo)}: {several} {show(wanted.gguf)} (there is {there}); "
            "name one, as owner/name/file.gguf"
        )
    stem = whole.pop()
    return sorted(n for n in names if _SHARD.sub("", n) == stem)


def _checked_gguf(wanted: HubName, folder: Path, files: list[str]) -> Path:
    """The first of the files, if all shards that its name promises are there."""
    count = _SHARD.search(files[0])
    if any(not (folder / file).is_file() for file in files) or (count and len(files) != int(count[1])):
        raise CheckpointError(
            f"{show(wanted.repo)}: {show(files[0])} is not complete, {len(files)} files are there; "
            "run with the network, or choose another file"
        )
    return folder / files[0]


def _checked(wanted: HubName, folder: Path) -> Path:
    """`folder`, if it holds a configuration and all weights that its index asks for."""
    name = wanted.repo
    for pattern in ("config.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise CheckpointError(
                f"{show(name)}: has no {pattern} (the download holds {holds(folder)}); "
                "choose a repository with a model in safetensors format, or name a .gguf file of this one, "
                "as owner/name/file.gguf"
            )
    try:
        find_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{show(name)}: the download is not usable: {error}") from error
    return folder


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

"""Conversations on disk, with their cache and the snapshots that lead back to earlier turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxhybrid.cache.portable import put_sequence, take_sequence
from jaxhybrid.conversation import Conversation
from jaxhybrid.errors import CacheFullError, CheckpointError
from jaxhybrid.files import fingerprint, store
from jaxhybrid.files.cache_files import snapshot_arrays, snapshot_of
from jaxhybrid.settings import Model


def save_session(path: str | Path, conversation: Conversation) -> None:
    """Write what was said, the cache and its snapshots to the folder `path`, replacing what was there."""
    arrays = {}
    if conversation.cache is not None and conversation.held:
        arrays |= {f"sequence.{n}": a for n, a in take_sequence(conversation.cache, 0).items()}
        for length, snapshot in conversation.snapshots.items():
            arrays |= {f"snapshot.{length}.{n}": a for n, a in snapshot_arrays(snapshot).items()}
    about = {
        "model": fingerprint.describe(conversation.model.params),
        "chat": conversation.chat,
        "messages": conversation.messages,
        "tokens": conversation.tokens,
        "turns": conversation.turns,
        "held": conversation.held if arrays else [],
        "forgotten": conversation.forgotten,
        "snapshots": sorted(conversation.snapshots) if arrays else [],
        "n_ctx": conversation.n_ctx,
    }
    store.write(path, "session", arrays, about)


def load_session(path: str | Path, model: Model, settings: dict[str, Any]) -> Conversation:
    """The conversation saved at `path`. The context is that of the settings, or as it was saved.

    Raises CheckpointError when the file does not fit the model, CacheFullError when the context is too small.
    """
    arrays, about = store.read(path, "session")
    fingerprint.check(about.get("model", {}), model.params, path)
    if settings["n_ctx"] is None:
        settings = settings | {"n_ctx": about["n_ctx"]}
    conversation = Conversation(model, settings, chat=bool(about["chat"]))
    conversation.messages = list(about["messages"])
    conversation.tokens, conversation.turns = list(about["tokens"]), list(about["turns"])
    if about["held"]:
        assert conversation.cache is not None
        held = len(about["held"]) - int(about["forgotten"])
        if held > conversation.n_ctx and not model.params.hparams.is_recurrent:
            raise CacheFullError(
                f"{path}: the session holds {held} tokens, the context {conversation.n_ctx}; "
                "raise --ctx, or leave it out"
            )
        cache = put_sequence(conversation.cache, 0, _part(arrays, "sequence"))
        for length in about["snapshots"]:
            part = _part(arrays, f"snapshot.{length}")
            conversation.snapshots[int(length)] = snapshot_of(part, cache)
        conversation.cache = cache
        conversation.held, conversation.forgotten = list(about["held"]), int(about["forgotten"])
    return conversation


def _part(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    found = {key[len(name) + 1 :]: a for key, a in arrays.items() if key.startswith(name + ".")}
    if not found:
        raise CheckpointError(f"{name}: missing from the saved session")
    return found

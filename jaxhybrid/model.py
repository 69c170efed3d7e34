"""The layer loop: `step` with a cache, `forward` without."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxhybrid.batch import Ubatch
from jaxhybrid.block import Wiring, block, layer_spec, shared_spec
from jaxhybrid.cache import hybrid
from jaxhybrid.cache.hybrid import Cache, Memory
from jaxhybrid.hparams import Hparams
from jaxhybrid.mixers.memory import Causal, RowStates
from jaxhybrid.ops.linear import linear, lookup
from jaxhybrid.ops.norms import rms_norm
from jaxhybrid.ops.scale import times
from jaxhybrid.params import Params, Tree, initialise, matrix, vector

OK, NO_ROOM, NON_FINITE, BAD_ROW = 0, 1, 2, 3
"""Status of a row: done; the step found no room and changed nothing; the row's activations are not
finite; the row's sequence is unknown, occurs twice, or does not continue at its start."""


class StepOutput(struct.PyTreeNode):
    """logits: float32 [O, V] of the tokens in `ubatch.outputs`. status: int32 [B], of each row: 0 done; 1 no
    room, nothing was changed; 2 activations that are not finite; 3 a sequence that is unknown, occurs twice,
    or does not continue at the row's start, nothing was changed."""

    logits: Array
    status: Array


# ------------------------------------------------------------------------------------- parameters


def spec(hparams: Hparams) -> Tree:
    """The tree of `TensorSpec` of a model: {"embed", "layers": {"0": ...}, "shared"?, "norm", "head"?}."""
    d_model, vocab, wiring = hparams.d_model, hparams.vocab_size, Wiring.of(hparams)
    tree: Tree = {
        "embed": {"weight": matrix(vocab, d_model, "vocab", "embed")},
        "layers": {str(i): layer_spec(layer, d_model, wiring) for i, layer in enumerate(hparams.layers)},
        "norm": {"weight": vector(d_model, "embed", wiring.norm_init)},
    }
    for i, layer in enumerate(hparams.layers):
        number = hparams.shared_block_of(i)
        if number is not None:
            tree.setdefault("shared", {}).setdefault(str(number), shared_spec(layer, d_model, wiring))
    if not hparams.tie_embeddings:
        tree["head"] = {"weight": matrix(vocab, d_model, "vocab", "embed")}
    return tree


def init_params(hparams: Hparams, key: Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters for training from scratch; `dtype` of all that is not kept in float32."""
    return Params(initialise(spec(hparams), key, jnp.dtype(dtype)), hparams)


# -------------------------------------------------------------------------------- both ends


def _embed(params: Params, tokens: Array) -> Array:
    hp = params.hparams
    x = lookup(params["embed"]["weight"], tokens) * jnp.asarray(hp.embedding_multiplier, params.dtype)
    return x.astype(jnp.float32) if hp.residual_in_float32 else x


def _final_norm(params: Params, x: Array) -> Array:
    hp = params.hparams
    return rms_norm(x, params["norm"]["weight"], hp.norm_eps, hp.norm_offset).astype(params.dtype)


def head(params: Params, x: Array) -> Array:
    """Hidden states after the final norm, [..., D], to logits float32 [..., V]."""
    hp = params.hparams
    weight = params["embed" if hp.tie_embeddings else "head"]["weight"]
    logits = times(linear(x, weight, dtype=jnp.dtype(jnp.float32)), hp.logits_multiplier)
    cap = hp.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _block(params: Params, i: int, x: Array, embedded: Array, memory: tuple[Any, Any], *where: Array) -> Any:
    """Layer `i`, with the weights it shares with others."""
    hp = params.hparams
    number = hp.shared_block_of(i)
    shared = None if number is None else params["shared"][str(number)]
    return block(
        params["layers"][str(i)],
        shared,
        x,
        None if shared is None else embedded,
        memory,
        *where,
        layer=hp.layers[i],
        wiring=Wiring.of(hp),
        dtype=params.dtype,
    )


# ---------------------------------------------------------------------------------- entry points


def step(params: Params, cache: Cache, ubatch: Ubatch) -> tuple[StepOutput, Cache]:
    """Advance the rows of a ubatch and return logits of the tokens that want them.

    Pure and jittable, differentiable with respect to params. The same function at T = 1 is decode and
    at larger T prefill. When a row cannot be taken or there is no room, the cache is returned with
    nothing changed and `status` says so (see StepOutput).
    """
    hidden, status, cache = encode(params, cache, ubatch)
    return StepOutput(logits=head(params, hidden), status=status), cache


def encode(params: Params, cache: Cache, ubatch: Ubatch) -> tuple[Array, Array, Cache]:
    """`step` up to the head: the hidden states [O, D] after the final norm, the status, and the cache."""
    hp = params.hparams
    n_tokens, seq_ids, lengths = ubatch.tokens.shape[1], ubatch.seq_ids, ubatch.lengths
    active = lengths > 0
    known = (seq_ids >= 0) & (seq_ids < cache.n_seq_max)
    safe_ids = jnp.clip(seq_ids, 0, cache.n_seq_max - 1)
    ends = hybrid.positions_max(cache)
    end = ends[safe_ids]
    starts = jnp.where(ubatch.starts < 0, end + 1, ubatch.starts)
    bad = active & (~known | ((end >= 0) & (starts != end + 1)) | (lengths > n_tokens))
    if ubatch.members is None:
        members = None
        twice = jnp.sum((seq_ids[:, None] == seq_ids) & active, axis=1) > 1
    else:
        members = ubatch.members | jax.nn.one_hot(safe_ids, cache.n_seq_max, dtype=bool)
        rows_of = jnp.sum(members & active[:, None], axis=0)
        twice = jnp.any(members & (rows_of > 1), axis=1)
        bad = bad | active & jnp.any(members & (ends != end[:, None]), axis=1)
    bad = bad | active & twice
    planned, plan = hybrid.plan(
        cache,
        safe_ids,
        members,
        ubatch.tokens,
        starts,
        lengths,
        ubatch.n_kv,
        ubatch.aligned,
        ~jnp.any(bad),
    )

    x = embedded = _embed(params, ubatch.tokens)
    memories = []
    for i in range(hp.n_layers):
        memory = hybrid.memory_of(planned, i, plan)
        x, memory = _block(params, i, x, embedded, memory, plan.positions, lengths)
        memories.append(Memory(*memory))
    planned = hybrid.with_memories(planned, memories)
    valid = jnp.arange(n_tokens) < lengths[:, None]
    finite = jnp.all(jnp.isfinite(x) | ~valid[:, :, None], axis=(1, 2))
    status = jnp.where(finite, OK, NON_FINITE)
    status = jnp.where(plan.ok, status, jnp.where(bad, BAD_ROW, NO_ROOM))
    wanted = x.reshape(-1, x.shape[-1])[jnp.clip(ubatch.outputs, 0, x.shape[0] * n_tokens - 1)]
    return _final_norm(params, wanted), status.astype(jnp.int32), planned


def forward(params: Params, tokens: Array, lengths: Array | None = None) -> Array:
    """Logits float32 [B, T, V] of tokens int32 [B, T] from position 0, without a cache: for training.

    lengths: int32 [B], real tokens of each row (None: all of them).
    """
    hp = params.hparams
    rows, n_tokens = tokens.shape
    if lengths is None:
        lengths = jnp.full(rows, n_tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(n_tokens, dtype=jnp.int32), tokens.shape)
    x = embedded = _embed(params, tokens)
    for i, layer in enumerate(hp.layers):
        causal = Causal(valid=positions < lengths[:, None], window=hp.window_of(i))
        state = None
        if layer.recurrent is not None:
            shapes = layer.recurrent.state_shapes
            state = RowStates({n: jnp.zeros((rows, *s), jnp.float32) for n, s in shapes.items()})
        x, _ = _block(params, i, x, embedded, (causal, state), positions, lengths)
    return head(params, _final_norm(params, x))

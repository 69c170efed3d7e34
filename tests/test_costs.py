"""No operation compiles twice, and none on one sequence touches more memory than it must.

The bytes are those of XLA's cost analysis of the compiled, donating operation.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
import tiny
from memory import KINDS, empty, feed, name_of

import jaxhybrid as jh
from jaxhybrid.hparams import RopeHparams

N_SEQ = 16
kinds = pytest.mark.parametrize("kind", KINDS, ids=name_of)


def cost(operation, cache, *arguments):
    """Bytes accessed, and bytes of temporaries, of one call that may consume the cache."""
    compiled = jax.jit(operation, donate_argnums=0).lower(cache, *arguments).compile()
    analysis = compiled.cost_analysis()
    memory = compiled.memory_analysis()
    return analysis["bytes accessed"], memory.temp_size_in_bytes, memory.alias_size_in_bytes


def tables(cache):
    """Bytes of positions, owners, slots and the like: everything but K/V and states."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    return total - sum(sum(layers.values()) for layers in jh.state_bytes(cache).values())


def one_sequence(cache):
    """Bytes of K/V of one stream, and of the states in one slot."""
    cells = sum(
        (k.nbytes + v.nbytes) // k.shape[0]
        for child in cache.cell_children
        for k, v in zip(child.keys, child.values, strict=True)
    )
    state = 0
    if cache.recurrent is not None:
        state = sum(a.nbytes // a.shape[0] for a in jax.tree.leaves(cache.recurrent.states))
    return cells, state


def big(kind, n_rollback=1):
    """So wide that copying K/V or states would show beside the tables."""
    name, unified = kind
    hp = tiny.hparams(name)
    attention = hp.attention if isinstance(hp.attention, tuple) else (hp.attention,) * hp.n_layers
    wide = tuple(dataclasses.replace(a, head_dim=256, rope=RopeHparams(dim=256)) for a in attention)
    state = dataclasses.replace(tiny.MAMBA2, head_dim=128, state_size=128)
    hp = dataclasses.replace(hp, attention=wide, recurrent=state)
    cache = jh.create_cache(hp, 512, N_SEQ, unified=unified, n_rollback=n_rollback, n_ubatch=256)
    wanted = sum(sum(layers.values()) for layers in jh.state_bytes(cache).values())
    assert wanted > 100 * tables(cache)
    return cache


@kinds
def test_removing_and_rolling_back_touch_tables_only(kind):
    cache = big(kind)
    cells, state = one_sequence(cache)
    ints = [jnp.int32(1)] * 3
    for operation, arguments in (
        (jh.seq_rm, ints),
        (jh.seq_keep, ints[:1]),
        (jh.roll_back, [jnp.zeros(N_SEQ, jnp.int32)]),
    ):
        accessed, temporary, aliased = cost(operation, cache, *arguments)
        assert aliased == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        # each table is read and written a few times, an intermediate of its size now and then
        assert accessed < 40 * tables(cache) + 40_000, operation
        assert temporary < 8 * tables(cache) + 8_000


@kinds
def test_copying_and_forking_touch_one_stream(kind):
    cache = big(kind)
    cells, state = one_sequence(cache)
    shared = cache.attention is None or cache.attention.unified
    # read source and target, write the target, and what lies between
    moved = 0 if shared else 6 * cells
    ints = [jnp.int32(1), jnp.int32(2), jnp.int32(-1), jnp.int32(-1)]
    accessed, temporary, _ = cost(jh.seq_cp, cache, *ints)
    assert accessed < moved + 40 * tables(cache) + 40_000
    assert temporary < 0.6 * moved + 8 * tables(cache) + 8_000
    accessed, _, _ = cost(jh.fork, cache, jnp.int32(0), jnp.arange(1, 5, dtype=jnp.int32))
    assert accessed < 4 * moved + 40 * tables(cache) + 40_000


@kinds
def test_checkpoints_and_rewinds_touch_one_state(kind):
    cache = big(kind)
    cells, state = one_sequence(cache)
    compiled = jax.jit(jh.checkpoint).lower(cache, jnp.int32(1)).compile()
    assert compiled.cost_analysis()["bytes accessed"] < 4 * state + 40 * tables(cache) + 40_000
    snapshot = jax.eval_shape(jh.checkpoint, cache, jnp.int32(1))
    accessed, temporary, aliased = cost(jh.try_rewind, cache, jnp.int32(1), snapshot)
    assert aliased == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert accessed < 6 * state + 40 * tables(cache) + 40_000
    assert temporary < 4 * state + 8 * tables(cache) + 8_000


@kinds
def test_shifting_touches_one_stream(kind):
    cache = big(kind)
    cells, _ = one_sequence(cache)
    ints = [jnp.int32(1), jnp.int32(-1), jnp.int32(-1), jnp.int32(3)]
    accessed, temporary, _ = cost(jh.seq_add, cache, *ints)
    # XLA adds up both branches: all streams at once (for sequence -1), and the one
    streams = 1 if cache.attention is None or cache.attention.unified else N_SEQ
    assert temporary < 8 * cells + 8 * tables(cache) + 8_000
    assert accessed < 30 * (streams + 1) * cells + 60 * tables(cache) + 60_000


@kinds
def test_no_operation_compiles_again(kind):
    chex.clear_trace_counter()
    _, cache = feed(kind, empty(kind, n_rollback=1), {0: [1, 2, 3], 1: [4]})
    snapshot = jh.checkpoint(cache, 0)
    numbers = {
        "seq_rm": [(0, -1, -1), (2, 3, 9), (-1, 0, 0)],
        "seq_cp": [(0, 1, -1, -1), (2, 0, 3, 9), (7, -1, 0, 0)],
        "seq_keep": [(0,), (-1,), (9,)],
        "seq_add": [(0, -1, -1, 4), (1, 0, 2, -3), (9, 0, 0, 0)],
        "seq_div": [(0, -1, -1, 4), (1, 0, 2, 1), (9, 0, 0, 0)],
        "checkpoint": [(0,), (2,), (9,)],
        "seq_pos_max": [(0,), (2,), (9,)],
        "is_lossy": [(0,), (-1,), (9,)],
    }
    for name, calls in numbers.items():
        operation = jax.jit(chex.assert_max_traces(getattr(jh, name), n=1))
        for call in calls:
            operation(cache, *call)
    rewind = jax.jit(chex.assert_max_traces(jh.try_rewind, n=1))
    for seq in (0, 1, 5):
        rewind(cache, seq, snapshot)
    for name, arrays in {
        "fork": [(0, jnp.asarray([1, 2])), (1, jnp.asarray([0, 9]))],
        "gather": [(jnp.asarray([0, 0, 1]),), (jnp.asarray([2, 1, 0]),)],
        "roll_back": [(jnp.asarray([0, 0, 1]),), (jnp.asarray([9, -1, 0]),)],
    }.items():
        operation = jax.jit(chex.assert_max_traces(getattr(jh, name), n=1))
        for call in arrays:
            operation(cache, *call)

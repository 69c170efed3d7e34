"""One compilation for each shape of a ubatch, whatever is in it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import token_loop
from jaxhybrid.clock import Clock
from jaxhybrid.sampling import make_sampling

WIDTHS = (1, 4)


def workload(step, kind, n_steps=30, unified=False):
    """Random rows: lengths from 0 to the width, any sequences, forks, removals and clearing between."""
    params = tiny.params(kind)
    cache = jh.create_cache(params.hparams, 64, 3, unified=unified, cell_multiple=8)
    draw = np.random.default_rng(0)
    for k in range(n_steps):
        width = WIDTHS[k % 2]
        tokens = draw.integers(0, tiny.VOCAB, (3, width))
        seq_ids = draw.permutation(3)
        lengths = draw.integers(0, width + 1, 3) if k % 5 else np.zeros(3)
        out, cache = step(params, cache, jh.make_ubatch(tokens, lengths, seq_ids))
        assert np.isfinite(out.logits).all()
        seq = int(draw.integers(0, 3))
        if k % 4 == 1:
            cache = jh.fork(cache, seq, ((seq + 1) % 3,))
        elif k % 4 == 2:
            cache, _ = jh.seq_rm(cache, seq, -1, -1)
        elif k % 11 == 10:
            cache = jh.clear(cache)
        elif k % 7 == 6:
            cache = jh.seq_keep(cache, seq)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_mixed_workload_compiles_once_for_each_shape(kind):
    chex.clear_trace_counter()
    workload(jax.jit(chex.assert_max_traces(jh.step, n=len(WIDTHS))), kind)


def test_the_count_above_can_fail():
    chex.clear_trace_counter()
    with pytest.raises(AssertionError, match="traced"):
        workload(jax.jit(chex.assert_max_traces(jh.step, n=len(WIDTHS) - 1)), "recurrent")


def test_operations_compile_once_for_any_numbers():
    chex.clear_trace_counter()
    cache = jh.create_cache(tiny.hparams("hybrid"), 8, 3, cell_multiple=8)
    for operation in (jh.seq_rm, jh.seq_cp, jh.seq_keep, jh.seq_pos_min, jh.seq_pos_max, jh.is_lossy):
        traced = jax.jit(chex.assert_max_traces(operation, n=1))
        n = {jh.seq_rm: 3, jh.seq_cp: 4, jh.seq_keep: 1}.get(operation, 1)
        for numbers in ((0, 1, -1, -1), (2, 0, 3, 9), (-1, 7, 0, 0)):
            traced(cache, *numbers[:n])


def test_the_driver_compiles_nothing_after_warming_up():
    """Batches of other contents, but the same bucket of length and number of rows."""
    params = tiny.params("hybrid")
    cache = jh.create_cache(params.hparams, 64, 3, cell_multiple=8)
    draw = np.random.default_rng(0)

    def batch():
        lengths = draw.integers(5, 9, 2)
        tokens = draw.integers(0, tiny.VOCAB, lengths.sum()).tolist()
        return jh.Batch(tokens, seq_ids=[(int(s),) for s in np.repeat(draw.permutation(3)[:2], lengths)])

    def turn():
        _, after = jh.decode(params, cache, batch())
        jax.block_until_ready(jh.seq_rm(jh.fork(after, 0, (1,)), 0, -1, -1))

    turn()
    with Clock() as clock:
        turn()
        turn()
    assert clock.compile == 0


def test_a_token_loop_compiles_once():
    params = tiny.params("hybrid")
    compiled = token_loop.advance._cache_size()  # type: ignore[attr-defined]
    for seed, temperature, top_p in ((0, 0.0, 1.0), (3, 0.7, 0.9), (9, 1.5, 0.2)):
        cache = jh.create_cache(params.hparams, 64, 3, cell_multiple=8)
        prompts = [[1 + seed], [2, 3], [4, 5, 6]]
        logits = jnp.zeros((3, tiny.VOCAB)).at[0, seed].set(1.0)
        sampling = make_sampling(3, temperature=temperature, top_p=top_p, seed=seed)
        _, state = token_loop.start(
            params, logits, prompts, [0, 1, 2], [0, 0, 0], [9, 5 + seed, 7], [[seed]] * 3, sampling
        )
        for _ in range(3):
            _, cache, state = token_loop.advance(params, cache, state, n_tokens=4, n_kv=64, aligned=True)
    assert token_loop.advance._cache_size() == compiled + 1  # type: ignore[attr-defined]

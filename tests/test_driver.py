"""The host-level driver compiles steps of few shapes, and nothing else."""

import jax
import numpy as np
import pytest
import tiny
from memory import LONGEST, NEAR, expected

import jaxhybrid as jh

PROGRAMS = 2 * 7
"""Rows, tokens and outputs of two sequences in steps of 2 tokens: 1 1 (0 1), 1 2 (0 1 2), 2 1 (0 2). Twice:
the first step of a batch leaves the cache that it was given, the others consume theirs."""


@pytest.fixture
def compiled():
    """Names of the programs that are compiled meanwhile."""
    names = []

    def note(event, duration_secs, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details["fun_name"]).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


def test_any_number_of_steps_and_outputs_compiles_nothing_but_steps(compiled):
    params = tiny.params("recurrent")
    cache = jh.create_cache(params.hparams, LONGEST, 2)
    draw = np.random.default_rng(0)

    def check_a_batch(n_tokens, n_outputs):
        order = draw.integers(0, 2, n_tokens)
        tokens = draw.integers(0, tiny.VOCAB, n_tokens)
        wanted = np.zeros(n_tokens, bool)
        wanted[draw.choice(n_tokens, n_outputs, replace=False)] = True
        batch = jh.Batch(tokens.tolist(), None, [(int(i),) for i in order], wanted.tolist())
        logits, _ = jh.decode(params, cache, batch, n_ubatch=2)
        assert isinstance(logits, jax.Array) and logits.shape == (n_outputs, tiny.VOCAB)
        for found, i in zip(np.asarray(logits), np.flatnonzero(wanted), strict=True):
            history = tokens[: i + 1][order[: i + 1] == order[i]]
            np.testing.assert_allclose(found, expected("recurrent", tuple(history.tolist())), **NEAR)

    expected("recurrent", (0,))
    check_a_batch(1, 1)
    compiled.clear()
    for _ in range(60):
        n_tokens = int(draw.integers(1, LONGEST + 1))
        check_a_batch(n_tokens, int(draw.integers(0, n_tokens + 1)))
    assert set(compiled) == {"step"} and len(compiled) < PROGRAMS, compiled

"""Logits and greedy text of Hugging Face transformers, recorded in tests/golden."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.params import Params

GOLDEN = Path(__file__).parent / "golden"
CLAMPED = "nemotron_h_small_dt"  # test_families.py says why
MODELS = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir() and p.name != CLAMPED)
CORE = ["granitemoehybrid", "llama", "mamba2"]
TOLERANCE = 5e-5
"""float32 sums in another order, through a few layers; 1e-5 is usual with logits of about 10."""

step = jax.jit(jh.step)
forward = jax.jit(jh.forward)


@cache
def params(name: str) -> Params:
    return jh.load_params(GOLDEN / name)


@cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name / "ref.npz") as stored:
        return dict(stored)


def new_cache(name: str, n_seq: int):
    return jh.create_cache(params(name).hparams, 64, n_seq, cell_multiple=8)


def close(logits, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(np.asarray(logits), expected, rtol=0, atol=tolerance)


@pytest.mark.quick
@pytest.mark.parametrize("name", CORE)
def test_logits_of_whole_sequences(name):
    """Every other family goes through a cache in test_families.py."""
    ref = reference(name)
    tokens = ref["input_ids"]
    assert tokens.shape[1] > 4 * 8  # several chunks of the chunk size below
    batch = jh.Batch(
        tokens.reshape(-1).tolist(),
        seq_ids=[(row,) for row in range(len(tokens)) for _ in range(tokens.shape[1])],
        outputs=[True] * tokens.size,
    )
    logits, _ = jh.decode(params(name), new_cache(name, len(tokens)), batch)
    close(logits.reshape(ref["logits"].shape), ref["logits"])


@pytest.mark.parametrize("name", MODELS)
def test_without_a_cache_and_greedy_text(name):
    """The continuation is checked by the argmax after every prefix of it, all in one pass."""
    ref = reference(name)
    prompt = ref["input_ids"][:, :11]
    whole = np.concatenate([prompt, ref["greedy"]], axis=1)
    width = ref["input_ids"].shape[1]
    padded = np.pad(whole, ((0, 0), (0, width - whole.shape[1])))
    lengths = jnp.full(len(whole), whole.shape[1])
    chosen = np.asarray(forward(params(name), jnp.asarray(padded), lengths)).argmax(-1)
    np.testing.assert_array_equal(chosen[:, 10 : whole.shape[1] - 1], ref["greedy"])
    close(forward(params(name), jnp.asarray(ref["input_ids"]), jnp.full(len(whole), width)), ref["logits"])


@pytest.mark.parametrize("name", CORE)
def test_token_by_token(name):
    ref = reference(name)
    tokens = ref["input_ids"]
    cache = new_cache(name, len(tokens))
    for t in range(tokens.shape[1]):
        # both ways of reaching the states in turn, so that each takes over from the other
        ubatch = jh.make_ubatch(tokens[:, t : t + 1], aligned=bool(t % 3))
        out, cache = step(params(name), cache, ubatch)
        close(out.logits, ref["logits"][:, t])


@pytest.mark.parametrize("name", CORE)
def test_uneven_pieces_padded_rows_and_strangers_in_one_pool(name):
    """Two sequences advance by pieces of other lengths in rows padded to 8, beside strangers."""
    ref = reference(name)
    tokens, width = ref["input_ids"], 8
    pieces = ([1, 7, 3, 8, 2, 5, 8, 8, 1], [8, 8, 8, 5, 0, 2, 7, 1, 4])
    assert all(sum(p) == tokens.shape[1] for p in pieces)
    cache = jh.create_cache(params(name).hparams, 256, 4, unified=True, cell_multiple=8)
    draw = np.random.default_rng(0)
    done = [0, 0]
    outputs = np.arange(4 * width)
    for piece in zip(*pieces, strict=True):
        rows = draw.integers(0, 96, (4, width))  # what lies behind a row's tokens is noise
        order = draw.permutation(4)  # sequence of each row
        lengths = draw.integers(0, 5, 4)
        for seq, n in enumerate(piece):
            row = int(np.flatnonzero(order == seq)[0])
            rows[row, :n], lengths[row] = tokens[seq, done[seq] : done[seq] + n], n
        out, cache = step(params(name), cache, jh.make_ubatch(rows, lengths, order, outputs=outputs))
        logits = np.asarray(out.logits).reshape(4, width, -1)
        for seq, n in enumerate(piece):
            row = int(np.flatnonzero(order == seq)[0])
            close(logits[row, :n], ref["logits"][seq, done[seq] : done[seq] + n])
            done[seq] += n


@pytest.mark.parametrize("name", CORE)
def test_left_padded_rows(name):
    """As others batch prompts: what a mask leaves out never enters the batch."""
    ref = reference(name)
    padded = np.pad(ref["input_ids"][:, :20], ((0, 0), (5, 0)))
    mask = np.ones(padded.shape, bool)
    mask[0, :5], mask[1, :9] = False, False
    padded[1] = np.roll(padded[1], 4)
    rows, columns = np.nonzero(mask)
    batch = jh.Batch(
        padded[rows, columns].tolist(), seq_ids=[(int(r),) for r in rows], outputs=[True] * len(rows)
    )
    logits, _ = jh.decode(params(name), new_cache(name, 2), batch)
    expected = np.concatenate([ref["logits"][0, :20], ref["logits"][1, :16]])
    close(logits, expected)


@pytest.mark.parametrize("name", CORE)
def test_greedy_text_on_the_device(name, tmp_path):
    ref = reference(name)
    model = jh.Model(params(name), tmp_path, 0.0)  # token ids need no tokenizer
    prompts = [row.tolist() for row in ref["input_ids"][:, :11]]
    results = jh.generate(model, [*prompts, prompts[0][:5]], max_tokens=12)
    assert [r.tokens for r in results[:2]] == ref["greedy"].tolist()


@pytest.mark.parametrize("name", CORE)
def test_bfloat16_is_near(name):
    """8 bits of mantissa in weights and activations: a few percent of the logits' spread."""
    ref = reference(name)
    half = jh.load_params(GOLDEN / name, jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    logits = np.asarray(forward(half, jnp.asarray(ref["input_ids"])))
    error = np.sqrt(np.mean((logits - ref["logits"]) ** 2)) / ref["logits"].std()
    assert 1e-4 < error < 0.05

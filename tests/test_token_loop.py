"""Token loops on the device: the same tokens whatever the company, the dispatch or the layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid import token_loop as loop
from jaxhybrid.hparams import AttentionHparams, Mamba2Hparams, MlpHparams
from jaxhybrid.ops.linear import lookup
from jaxhybrid.sampling import make_sampling

VOCAB = 53


def tiny(attention_layers=(1,)):
    hparams = jh.Hparams(
        family="granitemoehybrid",
        n_layers=3,
        d_model=32,
        vocab_size=VOCAB,
        attention_layer_indices=attention_layers,
        attention=AttentionHparams(n_heads=4, n_kv_heads=2, head_dim=8, scale=0.3),
        recurrent=Mamba2Hparams(n_heads=4, head_dim=16, state_size=8, chunk=4),
        mlp=MlpHparams(48),
        logits_multiplier=4.0,
        tie_embeddings=True,
    )
    return jh.init_params(hparams, jax.random.key(7))


@pytest.fixture(scope="module")
def params():
    return tiny()


def prompts_of(*lengths):
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def run(params, prompts, max_tokens=9, dispatch=4, stop_ids=(), unified=False, aligned=True, **sampling):
    rows = len(prompts)
    cache = jh.create_cache(
        params.hparams, 64 * (rows if unified else 1), rows, unified=unified, cell_multiple=64
    )
    batch = jh.Batch(
        [t for p in prompts for t in p], seq_ids=[(r,) for r, p in enumerate(prompts) for _ in p]
    )
    logits, cache = jh.decode(params, cache, batch)
    limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * rows
    first, state = loop.start(
        params,
        logits,
        prompts,
        list(range(rows)),
        [len(p) for p in prompts],
        limits,
        [list(stop_ids)] * rows,
        make_sampling(rows, **sampling),
    )
    written = [np.asarray(first)[:, None]]
    while np.any(np.asarray(state.finish) == loop.RUNNING):
        out, cache, state = loop.advance(params, cache, state, n_tokens=dispatch, n_kv=None, aligned=aligned)
        written.append(np.asarray(out))
    tokens = [[int(t) for t in row if t >= 0] for row in np.concatenate(written, axis=1)]
    return tokens, np.asarray(state.finish).tolist(), cache


def greedy_by_forward(params, prompt, n):
    forward, tokens = jax.jit(jh.forward), list(prompt)
    for _ in range(n):
        padded = jnp.zeros((1, 64), jnp.int32).at[0, : len(tokens)].set(jnp.asarray(tokens))
        tokens.append(int(jnp.argmax(forward(params, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((1,), id="hybrid", marks=pytest.mark.quick),
        pytest.param((), id="recurrent"),
        pytest.param((0, 1, 2), id="attention"),
    ],
)
def test_greedy_equals_recomputing_everything(layers):
    params = tiny(layers)
    prompts = prompts_of(3, 11)
    tokens, finish, _ = run(params, prompts)
    assert tokens == [greedy_by_forward(params, p, 9) for p in prompts]
    assert finish == [loop.LENGTH] * 2


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "seed": [5, 6, 7]}], ids=["greedy", "sampled"])
def test_company_dispatch_and_layout_do_not_matter(params, settings):
    prompts = prompts_of(2, 9, 5)
    together, _, _ = run(params, prompts, **settings)
    assert run(params, prompts, unified=True, **settings)[0] == together
    if not settings:  # greedy rows differ from others in how a token is chosen only
        return
    for row, prompt in enumerate(prompts):
        alone = {k: v[row] if isinstance(v, list) else v for k, v in settings.items()}
        assert run(params, [prompt], dispatch=3, **alone)[0][0] == together[row]
    assert run(params, prompts, dispatch=1, **settings)[0] == together
    assert run(params, prompts, aligned=False, **settings)[0] == together


def test_rows_stop_on_their_own(params):
    prompts = prompts_of(2, 9, 5)
    free, _, _ = run(params, prompts, max_tokens=12, temperature=1.5, seed=1)
    stop = free[1][4]
    tokens, finish, cache = run(params, prompts, max_tokens=12, temperature=1.5, seed=1, stop_ids=[stop])
    for row in range(3):
        if stop in free[row]:
            assert tokens[row] == free[row][: free[row].index(stop) + 1]
            assert finish[row] == loop.STOPPED
        else:
            assert tokens[row] == free[row] and finish[row] == loop.LENGTH
        # the newest token is never in the cache, and nothing was added after the end
        assert int(jh.seq_pos_max(cache, row)) + 1 == len(prompts[row]) + len(tokens[row]) - 1


def test_each_row_has_its_own_limit(params):
    tokens, finish, _ = run(params, prompts_of(4, 4, 4), max_tokens=[1, 0, 6])
    assert [len(t) for t in tokens] == [1, 0, 6]
    assert finish == [loop.LENGTH] * 3


def test_a_row_that_is_not_finite_ends_and_leaves_the_others(params):
    prompts = prompts_of(4, 6)
    alone = run(params, [prompts[0]])[0][0]
    bad = VOCAB - 1
    weight = params["embed"]["weight"].at[bad].set(jnp.nan)
    untied = jax.tree.map(lambda a: a, params.tensors) | {
        "embed": {"weight": weight},
        "head": {"weight": params["embed"]["weight"]},
    }
    import dataclasses

    poisoned = jh.Params(untied, dataclasses.replace(params.hparams, tie_embeddings=False))
    prompts[1][-1] = bad
    with pytest.warns(UserWarning, match="sequence 1: activations are not finite"):
        tokens, finish, _ = run(poisoned, prompts)
    assert finish[1] == loop.BROKEN and tokens[1] == []
    assert tokens[0] == alone


def test_settings_and_lengths_compile_nothing(params):
    prompts = prompts_of(4, 6)
    run(params, prompts)
    before = loop.advance._cache_size()  # pyright: ignore[reportFunctionMemberAccess]
    for settings in ({"temperature": 0.7}, {"top_k": 3, "temperature": 1.0}, {"repetition_penalty": 1.2}):
        run(params, prompts, seed=9, **settings)
    run(params, prompts_of(1, 8), stop_ids=[3], max_tokens=[2, 5])
    assert loop.advance._cache_size() == before  # pyright: ignore[reportFunctionMemberAccess]


def test_stopping_rows_from_outside(params):
    prompts = prompts_of(4, 6)
    cache = jh.create_cache(params.hparams, 64, 2)
    batch = jh.Batch(prompts[0] + prompts[1], seq_ids=[(0,)] * 4 + [(1,)] * 6)
    logits, cache = jh.decode(params, cache, batch)
    _, state = loop.start(params, logits, prompts, [0, 1], [4, 6], [9, 9], [[], []], make_sampling(2))
    state = loop.stop_rows(state, jnp.asarray([True, False]))
    out, cache, state = loop.advance(params, cache, state, n_tokens=4, n_kv=None, aligned=True)
    assert np.all(np.asarray(out)[0] == -1) and np.all(np.asarray(out)[1] >= 0)
    assert int(jh.seq_pos_max(cache, 0)) == 3


def test_a_loop_over_tokens_does_not_widen_the_bfloat16_embeddings():
    weight = jax.random.normal(jax.random.key(0), (4096, 64), jnp.bfloat16)

    def total(weight, token):  # each token says which is next
        def body(_, carry):
            token, sums = carry
            x = lookup(weight, token)
            return (token * 7 + x[:, 0].astype(jnp.int32)) % 4096, sums + x.astype(jnp.float32)

        return jax.lax.fori_loop(0, 5, body, (token, jnp.zeros((1, 64))))[1].sum()

    token = jnp.asarray([3])
    compiled = jax.jit(total).lower(weight, token).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < weight.nbytes
    index = jnp.asarray([[3, 4095], [0, 3]])
    assert (lookup(weight, index) == weight[index]).all()
    found = jax.grad(lambda w: lookup(w, index).sum())(weight)
    expected = jax.grad(lambda w: w[index].sum())(weight)
    assert (found == expected).all() and float(found[3, 0]) == 2

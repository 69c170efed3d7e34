"""The model inside the package gives what transformers makes of the same files."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.engine import embedded_folder

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def model():
    return jh.load(dtype=jnp.float32)


@pytest.fixture(scope="module")
def reference():
    with np.load(Path(__file__).parent / "golden" / "embedded.npz") as stored:
        return dict(stored)


def test_it_is_a_small_hybrid_with_its_own_licence_note(model):
    hp = model.params.hparams
    assert hp.is_hybrid and hp.attention_layer_indices == (3, 7)
    assert sum(f.stat().st_size for f in embedded_folder().iterdir()) < 8e6
    card = (embedded_folder() / "README.md").read_text()
    assert "bible-kjv-text" in card and "bits per byte" in card


def test_tokens_logits_and_text(model, reference):
    ids = model.tokenizer.encode(str(reference["text"]))
    assert ids == reference["input_ids"].tolist()
    assert model.tokenizer.decode(ids) == str(reference["text"])
    messages = [{"role": "user", "content": "Hello"}]
    assert model.tokenizer.encode_chat(messages) == reference["chat_ids"].tolist()
    cache = jh.create_cache(model.params.hparams, 64)
    outputs = [i >= len(ids) - 4 for i in range(len(ids))]
    logits, _ = jh.decode(model.params, cache, jh.Batch(ids, outputs=outputs))
    # float32 through 8 layers in another order of summation; 1e-5 was seen
    np.testing.assert_allclose(logits, reference["last_logits"], rtol=0, atol=1e-4)
    assert jh.generate(model, ids, max_tokens=24).tokens == reference["greedy"].tolist()

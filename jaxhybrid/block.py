"""One layer: norms, mixers, feed-forward block, and how each joins the residual stream."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxhybrid.hparams import AttentionHparams, Hparams, Layer, Residual
from jaxhybrid.mixers import attention, mixer_of
from jaxhybrid.ops.linear import linear
from jaxhybrid.ops.mlp import mlp, mlp_adapters_spec, mlp_spec
from jaxhybrid.ops.moe import moe, moe_spec
from jaxhybrid.ops.norms import rms_norm
from jaxhybrid.ops.scale import times
from jaxhybrid.params import Tree, matrix, vector


class Wiring(NamedTuple):
    """What a block needs of the hparams beside its layer."""

    norm_eps: float
    norm_offset: float

    @staticmethod
    def of(hp: Hparams) -> Wiring:
        return Wiring(hp.norm_eps, hp.norm_offset)

    @property
    def norm_init(self) -> str:
        """A norm begins as the identity."""
        return "zeros" if self.norm_offset else "ones"


def layer_spec(layer: Layer, d_model: int, wiring: Wiring) -> Tree:
    """What it has of {"norm", MIXER, "post_norm", "mlp_norm", "mlp", "moe", "mlp_post_norm", "shared"}."""
    tree: Tree = {}
    norm = vector(d_model, "embed", wiring.norm_init)

    def norms(names: tuple[str, str]) -> None:
        if layer.norms != "post":
            tree[names[0]] = norm
        if layer.norms != "pre":
            tree[names[1]] = norm

    own = [m for m in (layer.attention, layer.recurrent) if m is not None]
    if layer.shared_mlp is not None:
        own = [m for m in own if m is layer.recurrent]
        shared = _shared_attention(layer)
        adapters = {
            "attention": attention.adapters_spec(shared, d_model),
            "mlp": mlp_adapters_spec(layer.shared_mlp, d_model),
        }
        out = matrix(d_model, d_model, None, "embed")
        tree["shared"] = {"out": out} | {name: t for name, t in adapters.items() if t}
    if own:
        norms(("norm", "post_norm"))
    for hp in own:
        tree[hp.kind] = mixer_of(hp).spec(hp, d_model)
    if layer.mlp is not None or layer.moe is not None:
        norms(("mlp_norm", "mlp_post_norm"))
    if layer.mlp is not None:
        tree["mlp"] = mlp_spec(layer.mlp, d_model)
    if layer.moe is not None:
        tree["moe"] = moe_spec(layer.moe, d_model)
    return tree


def shared_spec(layer: Layer, d_model: int, wiring: Wiring) -> Tree:
    """The weights of a shared transformer block: {"norm", "attention", "mlp_norm", "mlp"}."""
    hp = _shared_attention(layer)
    assert layer.shared_mlp is not None
    return {
        "norm": vector(hp.d_in or d_model, "embed", wiring.norm_init),
        "attention": attention.spec(hp, d_model),
        "mlp_norm": vector(d_model, "embed", wiring.norm_init),
        "mlp": mlp_spec(layer.shared_mlp, d_model),
    }


def _shared_attention(layer: Layer) -> AttentionHparams:
    assert isinstance(layer.attention, AttentionHparams)
    return layer.attention


@partial(jax.jit, static_argnames=("layer", "wiring", "dtype"))
def block(
    p: Tree,
    shared: Tree | None,
    x: Array,
    embedded: Array | None,
    memory: tuple[Any, Any],
    positions: Array,
    lengths: Array,
    *,
    layer: Layer,
    wiring: Wiring,
    dtype: Any,
) -> tuple[Array, tuple[Any, Any]]:
    """One layer: x [B, T, D] and its (cells, slots) to the same. Traced once per layer kind.

    shared, embedded: the weights of the layer's shared block, and the embeddings [B, T, D] it reads; None
    where it has none. dtype: of the weights, and of the activations between them.
    """
    stored, state = memory

    def normed(x: Array, name: str) -> Array:
        return rms_norm(x, p[name], wiring.norm_eps, wiring.norm_offset)

    def before(x: Array, name: str) -> Array:
        return normed(x, name) if layer.norms != "post" else x

    def joined(x: Array, h: Array, parts: list[Array], how: Residual, post_norm: str) -> Array:
        y = sum(parts[1:], parts[0])
        y = normed(y, post_norm) if layer.norms != "pre" else y
        stream = times((h if how.from_norm else x).astype(x.dtype), how.stream)
        return stream + times(y.astype(x.dtype), how.branch)

    mixers, fed = [], x
    if layer.shared_mlp is not None:
        assert shared is not None and embedded is not None
        y, stored = _shared_block(
            p["shared"], shared, x, embedded, stored, positions, lengths, layer, wiring, dtype
        )
        fed = x + y.astype(x.dtype)  # the mixer sees it, the stream does not
    elif layer.attention is not None:
        mixers.append(layer.attention)
    if layer.recurrent is not None:
        mixers.append(layer.recurrent)
    if mixers:
        h = before(fed, "norm").astype(dtype)
        parts = []
        for hp in mixers:
            apply = mixer_of(hp).apply
            if hp is layer.attention:
                y, stored = apply(p[hp.kind], h, stored, positions, lengths, hp)
            else:
                y, state = apply(p[hp.kind], h, state, positions, lengths, hp)
            parts.append(y)
        x = joined(x, h, parts, layer.mixer_residual, "post_norm")
    if layer.mlp is not None or layer.moe is not None:
        h = before(x, "mlp_norm").astype(dtype)
        parts = []
        if layer.moe is not None:
            parts.append(moe(p["moe"], h, layer.moe))
        if layer.mlp is not None:
            parts.append(mlp(p["mlp"], h, layer.mlp))
        x = joined(x, h, parts, layer.feed_forward_residual, "mlp_post_norm")
    return x, (stored, state)


def _shared_block(
    own: Tree,
    shared: Tree,
    x: Array,
    embedded: Array,
    stored: Any,
    positions: Array,
    lengths: Array,
    layer: Layer,
    wiring: Wiring,
    dtype: Any,
) -> tuple[Array, Any]:
    """Attention and MLP in a row, with weights of many layers and adapters of this one (arXiv:2411.15242)."""
    hp, shared_mlp = _shared_attention(layer), layer.shared_mlp
    assert shared_mlp is not None
    both = jnp.concatenate([x, embedded.astype(x.dtype)], axis=-1)
    h = rms_norm(both, shared["norm"], wiring.norm_eps, wiring.norm_offset).astype(dtype)
    y, stored = attention.apply(
        shared["attention"] | own.get("attention", {}), h, stored, positions, lengths, hp
    )
    h = rms_norm(y, shared["mlp_norm"], wiring.norm_eps, wiring.norm_offset).astype(dtype)
    return linear(mlp(shared["mlp"] | own.get("mlp", {}), h, shared_mlp), own["out"]), stored

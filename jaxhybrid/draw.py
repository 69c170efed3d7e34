"""A token from logits: thresholds, whole-number chances, and the draw itself.

No sort over the vocabulary: a threshold is found by bisection over the bits of a float32 number
that is never negative, where the order of the bits is the order of the numbers. It is exact, and
tokens tied at a threshold are all kept.

Chances are whole numbers with a total just under 2**31: integer sums do not depend on the order of
summation, so a row draws the same token alone and in any batch, and a token of weight zero cannot
be drawn. A token of probability below 2.3e-10 has weight zero.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

_LANES = 16  # a vocabulary is folded to [B, 16, C]: a sum of 16 wide rows vectorises everywhere
_DEPTH = 3  # of the tree of sums for the draw; C is a multiple of 16**2
_BLOCK = 256  # of the argmax
_KEEP_ALL = 0x7F800000  # the bits of +inf as float32


def _without_nan(x: Array) -> Array:
    return jnp.where(jnp.isnan(x), -jnp.inf, x)


def argmax(x: Array) -> Array:
    """First largest of [B, V], block by block: several times faster on CPU than one argmax."""
    n_rows, vocab = x.shape
    x = jnp.pad(_without_nan(x), ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    x = x.reshape(n_rows, -1, _BLOCK)
    block = jnp.argmax(x.max(-1), -1)
    inside = jnp.argmax(jnp.take_along_axis(x, block[:, None, None], 1)[:, 0], -1)
    return (block * _BLOCK + inside).astype(jnp.int32)


def token_weights(logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Chances of tokens after temperature and filters, int32 [B, 16, C], 16 * C >= V: token v is
    at [v // C, v % C]. Logits [B, V], settings [B]; a temperature of 0 is taken as 1."""
    n_rows, vocab = logits.shape
    logits = _without_nan(logits)
    top = logits.max(-1, keepdims=True)
    temperature = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    # the distance below the largest logit, so that [0, inf] is the whole range
    gap = jnp.where(logits == top, 0.0, (top - logits) / temperature)
    gap = jnp.pad(gap, ((0, 0), (0, -vocab % _LANES**_DEPTH)), constant_values=jnp.inf)
    gap = gap.reshape(n_rows, _LANES, -1)
    bits = lax.bitcast_convert_type(gap, jnp.int32)

    top_k_on = (top_k > 0) & (top_k < vocab)
    limit = _if_any(top_k_on, lambda: _threshold(bits, 1, top_k, top_k_on))
    chance = jnp.where(bits <= limit[:, None, None], jnp.exp(-gap), 0.0)
    weights = _whole(chance, vocab)

    top_p_on = top_p < 1

    def nucleus() -> Array:
        mass = total_weight(weights)
        need = jnp.ceil(top_p * mass.astype(jnp.float32)).astype(jnp.int32)
        return _threshold(bits, weights, jnp.clip(need, 1, mass), top_p_on)

    limit = _if_any(top_p_on, nucleus)
    kept = (bits <= limit[:, None, None]) & (chance >= min_p[:, None, None])
    return jnp.where(kept, weights, 0)


def _if_any(on: Array, threshold: Callable[[], Array]) -> Array:
    return lax.cond(on.any(), threshold, lambda: jnp.full(on.shape, _KEEP_ALL, jnp.int32))


def _threshold(bits: Array, weights: Array | int, need: Array, on: Array) -> Array:
    """Smallest t [B] for which the weights where `bits <= t` sum to `need` or more; rows that are
    not `on` get the one that keeps all. A sum that meets `need` exactly ends a row's search."""

    def step(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        mass = total_weight(jnp.where(bits <= middle[:, None, None], weights, 0))
        low = jnp.where(mass < need, middle + 1, jnp.where(mass == need, middle, low))
        return low, jnp.where(mass < need, high, middle)

    low = jnp.where(on, 0, _KEEP_ALL)
    need = jnp.where(on, need, 0)
    bounds = (low, jnp.full_like(low, _KEEP_ALL))
    return lax.while_loop(lambda b: (b[0] < b[1]).any(), step, bounds)[1]


def _whole(chance: Array, vocab: int) -> Array:
    """Numbers of [0, 1] as int32 in the same proportion, with a total a little under 2**31."""
    # two digits per number: the total, by which to divide, has to be an exact integer sum as well
    digit = min(12, 31 - vocab.bit_length())
    fixed = jnp.ceil(chance * 4.0**digit).astype(jnp.int32)
    high = total_weight(fixed >> digit).astype(jnp.float32)
    low = total_weight(fixed & (2**digit - 1)).astype(jnp.float32)
    total = high * 2.0**-digit + low * 4.0**-digit
    room = 2**31 - 2 * vocab - 4096  # rounding adds at most half a unit per token
    return jnp.rint(chance * (room / total)[:, None, None]).astype(jnp.int32)


def total_weight(weights: Array) -> Array:
    """Sum of weights [B, 16, C] per row, exact below 2**31."""
    return _fold(weights).sum(-1)


def _fold(x: Array) -> Array:
    """Sum over axis 1 of [B, 16, C], spelled so that it vectorises within a fused loop."""
    total = x[:, 0]
    for lane in range(1, _LANES):
        total = total + x[:, lane]
    return total


def pick(weights: Array, uniform: Array) -> Array:
    """Token ids [B] drawn in proportion to weights [B, 16, C] with random uint32 [B]."""
    # level by level, a sum of 16 entries of the level below; then down again to one token
    tree, mass = [weights], _fold(weights)
    for _ in range(_DEPTH - 1):
        tree.append(mass.reshape(mass.shape[0], _LANES, -1))
        mass = _fold(tree[-1])
    rest = _below(uniform, mass.sum(-1))
    index, rest = _locate(mass, rest)
    for level in reversed(tree):
        column = jnp.take_along_axis(level, index[:, None, None], 2)[:, :, 0]
        lane, rest = _locate(column, rest)
        index = lane * level.shape[2] + index
    return index


def _below(uniform: Array, total: Array) -> Array:
    """`uniform * total >> 32`, the high half of a 64-bit product: uint32 bits to [0, total)."""
    total = total.astype(jnp.uint32)
    u_high, u_low = uniform >> 16, uniform & 0xFFFF
    t_high, t_low = total >> 16, total & 0xFFFF
    middle = u_high * t_low + (u_low * t_low >> 16)
    carry = u_low * t_high + (middle & 0xFFFF)
    return (u_high * t_high + (middle >> 16) + (carry >> 16)).astype(jnp.int32)


def _locate(weights: Array, rest: Array) -> tuple[Array, Array]:
    """Index [B] of the first running sum of a few weights [B, n] above `rest` [B], and `rest` less
    the sum before it."""
    earlier = jnp.tri(weights.shape[1], dtype=bool)  # compiles in a fifth of a cumsum's time
    sums = jnp.where(earlier, weights[:, None, :], 0).sum(-1)
    passed = sums <= rest[:, None]
    before = jnp.where(passed, sums, 0).max(-1)
    return passed.sum(-1, dtype=jnp.int32), rest - before

"""Definitions in numpy float64, from the formulas: recurrences token after token, MLA query after query."""

from typing import Any

import numpy as np

from jaxhybrid.hparams import MlaHparams, MoeHparams, RopeHparams

Result = tuple[np.ndarray, np.ndarray]


def exact(values: Any) -> list[np.ndarray]:
    return [np.asarray(a, np.float64) for a in values]


def ssd(inputs: Any, state: Any) -> Result:
    """u [B, T, H, P], b and c [B, T, G, N], log_a [B, T, H], state [B, H, P, N]: (y [B, T, H, P], state)."""
    u, b, c, log_a, s = exact((*inputs, state))
    group = np.arange(u.shape[2]) // (u.shape[2] // b.shape[2])  # of each head
    y = np.zeros_like(u)
    for t in range(u.shape[1]):
        s = np.exp(log_a[:, t, :, None, None]) * s + u[:, t, :, :, None] * b[:, t, group, None]
        y[:, t] = (s @ c[:, t, group, :, None])[..., 0]
    return y, s


def delta_rule(inputs: Any, state: Any) -> Result:
    """q and k [B, T, G, K], v [B, T, H, V], log_a [B, T, H] or [B, T, H, K], beta [B, T, H], S [B, H, K, V].

    S_t = (1 - beta k k^T) a S_{t-1} + beta k v^T: (y [B, T, H, V], S).
    """
    q, k, v, log_a, beta, s = exact((*inputs, state))
    group = np.arange(v.shape[2]) // (v.shape[2] // k.shape[2])
    a = np.exp(log_a if log_a.ndim == 4 else log_a[..., None])[..., None]
    y = np.zeros_like(v)
    for t in range(v.shape[1]):
        s = a[:, t] * s
        key, query = k[:, t, group, :, None], q[:, t, group, None]
        wrong = v[:, t, :, None] - key.swapaxes(-1, -2) @ s
        s = s + key * (beta[:, t, :, None, None] * wrong)
        y[:, t] = (query @ s)[:, :, 0]
    return y, s


def selective_scan(a: Any, inputs: Any, state: Any) -> Result:
    """a [C, N], dt and u [B, T, C], b and c [B, T, G, N], state [B, C, N]: (y [B, T, C], state)."""
    a, dt, u, b, c, h = exact((a, *inputs, state))
    part = np.arange(u.shape[2]) // (u.shape[2] // b.shape[2])  # of each channel
    y = np.zeros_like(u)
    for t in range(u.shape[1]):
        h = np.exp(dt[:, t, :, None] * a) * h + u[:, t, :, None] * b[:, t, part]
        y[:, t] = np.sum(h * c[:, t, part], axis=-1)
    return y, h


def rg_lru(inputs: Any, state: Any) -> Result:
    """u and log_a [B, T, W], state [B, W]: (h [B, T, W], state)."""
    u, log_a, h = exact((*inputs, state))
    y = np.zeros_like(u)
    for t in range(u.shape[1]):
        y[:, t] = h = np.exp(log_a[:, t]) * h + u[:, t]
    return y, h


# ---------------------------------------------------------------------------- rotary embedding


def pair_with_turns(rope: RopeHparams, turns: float) -> float:
    """The pair, a real number, that turns so often within the original context; by bisection."""
    low, high = -4.0 * rope.dim, 4.0 * rope.dim
    for _ in range(100):
        middle = (low + high) / 2
        turned = rope.original_context * rope.theta ** (-2 * middle / rope.dim) / (2 * np.pi)
        low, high = (middle, high) if turned > turns else (low, middle)
    return low


def radians(rope: RopeHparams) -> np.ndarray:
    """A position's angle of each pair. yarn, longrope and proportional as their releases state them."""
    found = []
    for pair in range(rope.dim // 2):
        w = rope.theta ** (-2 * pair / rope.dim)
        if rope.scaling == "yarn":
            first, last = pair_with_turns(rope, rope.beta_fast), pair_with_turns(rope, rope.beta_slow)
            if rope.truncate:
                first, last = np.floor(first), np.ceil(last)
            first, last = max(first, 0), min(last, rope.dim - 1)
            # pairs up to `first` keep their frequency, those from `last` on are slowed, a line between
            slowed = min(max((pair - first) / (last - first), 0), 1)
            w = w / rope.factor * slowed + w * (1 - slowed)
        elif rope.scaling == "longrope":
            w /= (rope.long_factors if rope.long else rope.short_factors)[pair]
        elif rope.scaling == "proportional":
            w = w if pair < rope.fraction * rope.dim / 2 else 0.0
        found.append(w)
    return np.array(found)


def turned(vector: np.ndarray, position: int, rope: RopeHparams | None) -> np.ndarray:
    """One head's vector. Pair i is (i, i + dim / 2), or (2 i, 2 i + 1) where they are interleaved."""
    vector = np.array(vector, np.float64)
    if rope is None:
        return vector
    for i, w in enumerate(radians(rope)):
        one, two = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + rope.dim // 2)
        z = rope.amplitude * np.exp(1j * w * position) * complex(vector[one], vector[two])
        vector[one], vector[two] = z.real, z.imag
    return vector


# ------------------------------------------------------------------------ latent attention, experts


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + eps)


def mla_row(p: Any, x: np.ndarray, first: int, hp: MlaHparams) -> np.ndarray:
    """One row [T, D] that begins at position `first`, with keys and values of every head."""
    p, x = {name: np.asarray(a, np.float64) for name, a in p.items()}, x.astype(np.float64)
    queries, keys, values, out = [], [], [], []
    for t, token in enumerate(x):
        q = p["q"] @ token if hp.q_rank is None else None
        if q is None:
            q = p["q_up"] @ (_rms(p["q_down"] @ token, hp.norm_eps) * p["q_norm"])
        q = q.reshape(hp.n_heads, hp.nope_dim + hp.rope_dim)
        down = p["kv_down"] @ token
        latent = _rms(down[: hp.kv_rank], hp.norm_eps) * p["kv_norm"]
        shared = turned(down[hp.kv_rank :], first + t, hp.rope)
        parts = [(p["kv_up"][h] @ latent).copy() for h in range(hp.n_heads)]
        keys.append([np.concatenate([part[: hp.nope_dim], shared]) for part in parts])
        values.append([part[hp.nope_dim :] for part in parts])
        queries.append(
            [np.concatenate([h[: hp.nope_dim], turned(h[hp.nope_dim :], first + t, hp.rope)]) for h in q]
        )
        mixed = []
        for h in range(hp.n_heads):
            scores = np.array([hp.scale * queries[t][h] @ keys[s][h] for s in range(t + 1)])
            weights = np.exp(scores - scores.max())
            head = sum(w * values[s][h] for s, w in enumerate(weights / weights.sum()))
            mixed.append(head * sigmoid(p["gate"][h] @ token) if hp.gate else head)
        out.append(p["out"] @ np.concatenate(mixed))
    return np.array(out)


def best(scores: np.ndarray, n: int) -> list[int]:
    """The n largest, the first of equal ones."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:n]


def route(logits: np.ndarray, bias: np.ndarray | None, hp: MoeHparams) -> tuple[list[int], np.ndarray]:
    """One token's experts and their weights."""
    if hp.scores == "softmax":
        scores = np.exp(logits - logits.max())
        scores = scores / scores.sum()
    else:
        scores = sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    size = hp.n_experts // hp.n_groups
    by_group = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(hp.n_groups)]
    groups = best(np.array(by_group), hp.top_groups)
    allowed = np.array([e // size in groups for e in range(hp.n_experts)])
    experts = best(np.where(allowed, ranked, -np.inf), hp.top_k)
    weights = scores[experts]
    if hp.renormalise:
        weights = weights / (weights.sum() + hp.renormalise_eps)
    return experts, weights * hp.multiplier

"""The encodings of layer kinds found in configurations, and one form for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxhybrid.errors import HparamsError

_ATTENTION_WORDS = frozenset({"attention", "full_attention", "sliding_attention"})
_RECURRENT_WORDS = frozenset({"mamba", "mamba2", "linear_attention", "recurrent", "conv"})
_BOTH_WORDS = frozenset({"hybrid"})
_NEITHER_WORDS = frozenset({"mlp", "moe"})
_PATTERN = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}

LAYER_ENCODINGS = (
    "attention_layer_indices",
    "layer_types",
    "kv_heads",
    "recurrent_layers",
    "interval",
    "period",
    "pattern",
)


def resolve_layers(
    n_layers: int,
    *,
    attention_layer_indices: Sequence[int] | None = None,
    layer_types: Sequence[str] | None = None,
    kv_heads: Sequence[int] | None = None,
    recurrent_layers: Sequence[bool] | None = None,
    interval: int | None = None,
    period: int | None = None,
    offset: int | None = None,
    pattern: str | None = None,
    field_names: Mapping[str, str] | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Turn any encoding of the layer kinds into (attention indices, recurrent indices).

    attention_layer_indices: the list itself. layer_types: one word a layer. kv_heads: heads of K/V a
    layer, 0 where it has none. recurrent_layers: one boolean a layer. interval: every interval-th layer
    is attention. period and offset: layer i is attention iff i % period == offset. pattern: one
    character a layer, `*` attention, `M` recurrent, `-` MLP, `E` experts. `field_names` gives the names
    to use in errors. Several may be given; HparamsError if they disagree, naming both.
    """
    names = {key: (field_names or {}).get(key, key) for key in (*LAYER_ENCODINGS, "offset")}
    kinds: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def from_words(key: str, words: Sequence[str]) -> None:
        _checked_length(names[key], words, n_layers)
        known = _ATTENTION_WORDS | _RECURRENT_WORDS | _BOTH_WORDS | _NEITHER_WORDS
        for i, word in enumerate(words):
            if word not in known:
                raise HparamsError(f"{names[key]}: unknown layer kind {word!r} at layer {i}")
        kinds[key] = (
            tuple(i for i, w in enumerate(words) if w in _ATTENTION_WORDS | _BOTH_WORDS),
            tuple(i for i, w in enumerate(words) if w in _RECURRENT_WORDS | _BOTH_WORDS),
        )

    def from_attention(key: str, attention: Iterable[int]) -> None:
        chosen = checked_indices(names[key], attention, n_layers)
        kinds[key] = (chosen, tuple(i for i in range(n_layers) if i not in chosen))

    if attention_layer_indices is not None:
        from_attention("attention_layer_indices", attention_layer_indices)
    if layer_types is not None:
        from_words("layer_types", layer_types)
    if kv_heads is not None:
        _checked_length(names["kv_heads"], kv_heads, n_layers)
        for i, heads in enumerate(kv_heads):
            if isinstance(heads, bool) or not isinstance(heads, int) or heads < 0:
                raise HparamsError(f"{names['kv_heads']}: {heads!r} at layer {i} is no number of heads")
        from_attention("kv_heads", (i for i, heads in enumerate(kv_heads) if heads))
    if recurrent_layers is not None:
        _checked_length(names["recurrent_layers"], recurrent_layers, n_layers)
        from_attention("recurrent_layers", (i for i, r in enumerate(recurrent_layers) if not r))
    if interval is not None:
        _checked_at_least(names["interval"], interval, 1)
        from_attention("interval", range(interval - 1, n_layers, interval))
    if (period is None) != (offset is None):
        given, absent = ("period", "offset") if offset is None else ("offset", "period")
        raise HparamsError(f"{names[given]}: needs {names[absent]} beside it")
    if period is not None and offset is not None:
        _checked_at_least(names["period"], period, 1)
        if not 0 <= offset < period:
            raise HparamsError(f"{names['offset']}: {offset} is out of range for {names['period']}={period}")
        from_attention("period", range(offset, n_layers, period))
    if pattern is not None:
        unknown = [c for c in pattern if c not in _PATTERN]
        if unknown:
            raise HparamsError(f"{names['pattern']}: unknown layer kind {unknown[0]!r}")
        from_words("pattern", [_PATTERN[c] for c in pattern])

    if not kinds:
        raise HparamsError("layer_types: missing, nothing says which layers are attention")
    first, *others = kinds
    for other in others:
        if kinds[other] != kinds[first]:
            differing = min(
                set(kinds[other][0]) ^ set(kinds[first][0]) or set(kinds[other][1]) ^ set(kinds[first][1])
            )
            raise HparamsError(f"{names[other]}: contradicts {names[first]} at layer {differing}")
    return kinds[first]


def _checked_length(field: str, values: Sequence[object], n_layers: int) -> None:
    if len(values) != n_layers:
        raise HparamsError(f"{field}: {len(values)} entries, but the model has {n_layers} layers")


def _checked_at_least(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise HparamsError(f"{field}: {value!r} must be a whole number of at least {least}")


def checked_indices(field: str, indices: Iterable[int], n_layers: int) -> tuple[int, ...]:
    found = list(indices)
    for i in found:
        if isinstance(i, bool) or not isinstance(i, int):
            raise HparamsError(f"{field}: {i!r} is not a layer index")
        if not 0 <= i < n_layers:
            raise HparamsError(f"{field}: {i} is out of range, the model has {n_layers} layers")
    if len(set(found)) != len(found):
        raise HparamsError(f"{field}: a layer index occurs twice in {found}")
    return tuple(sorted(found))

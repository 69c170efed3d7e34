"""Attention that goes over the cells block by block (arXiv:2205.14135) and ends at the last one in sight.

No scores reach memory, and cells beyond the last visible one are neither fetched nor multiplied, so a step
costs what is stored and not what is reserved. K/V are read where they lie. One body serves both platforms;
on a TPU the blocks of cells are the innermost axis of the grid, on a GPU they are a loop, and the cells of a
row are split among several programs that XLA's code joins.

Neither of JAX's own kernels fits: cuDNN's wants a stream for each row, takes a mask only as an added matrix
and has no float32; the TPU's splash attention wants its mask while tracing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from jaxhybrid.buckets import bucket
from jaxhybrid.kernels.platform import Precision, by_platform, powers_of_2, triton_precision
from jaxhybrid.kernels.sight import Sight
from jaxhybrid.precision import precision_of

Plain = Callable[[Array, Array, Array, Array, float], Array]

_HIDDEN = -1e30
_TPU_LANES = 128
_TPU_CELLS = 512
_TPU_ROWS = 512
_GPU_ROWS = 64
_GPU_BLOCK_BYTES = 16384
_GPU_PROGRAMS = 264
"""Two for each multiprocessor of an H100."""


def attend(plain: Plain, q: Array, keys: Array, values: Array, sight: Sight, scale: float) -> Array:
    """softmax(scale q k) v, head h of q using K/V head h // (H / KV heads); plain on all but TPU and CUDA.

    q: [B, T, H, K]. keys: [B or 1, KV heads, at least S, K], values: the same with V; only the first S cells
    are looked at. A query that sees nothing gets a finite, meaningless answer. plain: the same function of
    q, keys, values, a mask bool [B, T, S] and scale; its gradient serves every platform. Returns
    [B, T, H, V] in the dtype of q.
    """

    def in_xla(q: Array, keys: Array, values: Array, sight: Sight) -> Array:
        k, v = (cells[:, :, : sight.n_cells].astype(q.dtype) for cells in (keys, values))
        return plain(q, k, v, sight.mask, scale)

    kernels = {
        name: partial(kernel, scale=scale)
        for name, (fits, kernel) in _KERNELS.items()
        if fits(q, keys, values, sight)
    }
    return by_platform(in_xla, kernels, q, keys, values, sight)


# -------------------------------------------------------------------------------- queries in tiles


class _Tiles(NamedTuple):
    """Queries that meet the same cells, in tiles of `tokens` tokens; row m of a tile is head m // tokens.

    q: [R, KV heads, tiles, M, K]. cells: int32 [R, 1 or M, S], positions, or, for each row m, 0 where seen,
    else -1. starts: int32 [R]. used: int32 [R, tiles], one past the highest cell that a tile may see.
    """

    q: Array
    cells: Array
    starts: Array
    used: Array
    tokens: int
    window: int | None


def _tiles(q: Array, keys: Array, sight: Sight, most_rows: int) -> _Tiles:
    rows, n_tokens, n_heads, size = q.shape
    n_kv = keys.shape[1]
    per_kv = n_heads // n_kv
    cells, starts, window = sight.cells, sight.starts, sight.window
    if _folds(q, keys, most_rows):  # rows that see the same cells read them together
        q = q.reshape(rows, n_kv, per_kv, size).swapaxes(0, 1).reshape(1, n_kv, 1, rows * per_kv, size)
        seen = jnp.where(sight.mask[:, 0], 0, -1)
        used = jnp.max(_end(seen, jnp.zeros((rows, 1), jnp.int32)), axis=0, keepdims=True)
        return _Tiles(q, jnp.repeat(seen, per_kv, 0)[None], jnp.zeros(1, jnp.int32), used, 1, None)
    tokens = min(bucket(n_tokens), max(bucket(most_rows // per_kv + 1) // 2, 1))
    n_tiles = -(-n_tokens // tokens)
    q = jnp.pad(q, ((0, 0), (0, n_tiles * tokens - n_tokens), (0, 0), (0, 0)))
    q = q.reshape(rows, n_tiles, tokens, n_kv, per_kv, size).transpose(0, 3, 1, 4, 2, 5)
    q = q.reshape(rows, n_kv, n_tiles, per_kv * tokens, size)
    newest = starts[:, None] + tokens * jnp.arange(1, n_tiles + 1, dtype=jnp.int32) - 1
    return _Tiles(q, cells[:, None], starts, _end(cells, newest), tokens, window)


def _from_tiles(y: Array, rows: int, n_tokens: int, tokens: int) -> Array:
    """[R, KV heads, tiles, M, V] back to [B, T, H, V]."""
    streams, n_kv, n_tiles, n_rows, size = y.shape
    if streams < rows:
        return y.reshape(n_kv, rows, -1, size).swapaxes(0, 1).reshape(rows, 1, -1, size)
    y = y.reshape(rows, n_kv, n_tiles, n_rows // tokens, tokens, size).transpose(0, 2, 4, 1, 3, 5)
    return y.reshape(rows, n_tiles * tokens, -1, size)[:, :n_tokens]


def _folds(q: Array, keys: Array, most_rows: int) -> bool:
    rows, n_tokens, n_heads, _ = q.shape
    return n_tokens == 1 and keys.shape[0] == 1 < rows and rows * n_heads // keys.shape[1] <= most_rows


def _end(cells: Array, newest: Array) -> Array:
    """One past the last of cells [B, S] at a position in 0 .. newest [B, N]: int32 [B, N]."""
    index = jnp.arange(1, cells.shape[1] + 1, dtype=jnp.int32)
    seen = (cells >= 0)[:, None] & (cells[:, None] <= newest[:, :, None])
    return jnp.max(jnp.where(seen, index, 0), axis=2)


# ------------------------------------------------------------------------------- the common body


def _seen(
    cells: Array, first: Any, used: Any, start: Any, tokens: int, n_rows: int, window: int | None
) -> Array:
    """bool [M, block]: which cells (positions [1 or M, block], the block beginning at `first`) rows see."""
    index = first + lax.broadcasted_iota(jnp.int32, (1, cells.shape[1]), 1)
    query = start + (lax.broadcasted_iota(jnp.int32, (n_rows, 1), 0) & (tokens - 1))
    seen = (cells >= 0) & (index < used) & (cells <= query)
    return seen if window is None else seen & (cells > query - window)


def _absorb(
    carry: tuple[Array, Array, Array],
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    scale: float,
    axes: tuple[int, int],
    precision: Precision,
) -> tuple[Array, Array, Array]:
    """One block of cells into (largest score [M, 1], sum of weights [M, 1], sum of weighted values [M, V]).

    q: [M, K]. k, v: the block, its cells on the axes given. seen: bool [M, block].
    """

    def product(a: Array, b: Array, axis: int) -> Array:
        dimensions = (((1,), (axis,)), ((), ()))
        return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)

    largest, total, mixed = carry
    # select, never add: what lies in an unused cell must not matter, not even NaN
    scores = jnp.where(seen, product(q, k, 1 - axes[0]) * scale, _HIDDEN)
    new = jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
    fade = jnp.exp(largest - new)
    total = total * fade + jnp.sum(weights, axis=1, keepdims=True)
    return new, total, mixed * fade + product(weights.astype(v.dtype), v, axes[1])


# --------------------------------------------------------------------------------------------- TPU


def _fits_tpu(q: Array, keys: Array, values: Array, sight: Sight) -> bool:
    sizes = (keys.shape[3], values.shape[3])
    return (
        _dtypes_fit(q, keys, values) and sight.n_cells % _TPU_LANES == 0 and all(n % 64 == 0 for n in sizes)
    )


def on_tpu(
    q: Array, keys: Array, values: Array, sight: Sight, scale: float, *, interpret: bool = False
) -> Array:
    """`attend` by Mosaic. Needs S to be a multiple of 128 and head sizes that are multiples of 64."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, n_tokens = q.shape[:2]
    t = _tiles(q, keys, sight, _TPU_ROWS)
    streams, n_kv, n_tiles, n_rows, k_size = t.q.shape
    v_size = values.shape[3]
    n_cells = min(sight.n_cells, _TPU_CELLS)
    # XLA lays an array whose last axis does not fill the lanes out with its cells there: so it lies already
    flat = tuple(size % _TPU_LANES != 0 for size in (k_size, v_size))
    keys, values = (b.swapaxes(2, 3) if f else b for b, f in zip((keys, values), flat, strict=True))
    axes = (int(flat[0]), int(flat[1]))
    if not interpret:  # XLA would fetch all cells ahead, those behind the last one too
        keys, values = _in_main_memory(keys), _in_main_memory(values)
    heads = n_kv if n_kv * n_rows <= _TPU_ROWS else 1
    while heads * max(k_size, v_size) * n_cells > 2**18:
        heads = next((n for n in range(heads - 1, 0, -1) if n_kv % n == 0), 0)
    heads = max(heads, 1)

    def kernel(*refs: Any) -> None:
        used_ref, start_ref, q_ref, k_ref, v_ref, cells_ref, y_ref, largest_ref, total_ref, mixed_ref = refs
        row, tile, block = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        used, first = used_ref[row, tile], block * n_cells

        @pl.when(block == 0)
        def _() -> None:
            largest_ref[...] = jnp.full(largest_ref.shape, _HIDDEN, jnp.float32)
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
            mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)

        @pl.when(first < used)
        def _() -> None:
            start = start_ref[row] + tile * t.tokens
            seen = _seen(cells_ref[0], first, used, start, t.tokens, n_rows, t.window)
            for h in range(heads):
                k, v = k_ref[0, h].astype(q.dtype), v_ref[0, h].astype(q.dtype)
                # what lies behind the last cell would meet weights of 0, and 0 times NaN is NaN
                v = jnp.where(first + lax.broadcasted_iota(jnp.int32, v.shape, axes[1]) < used, v, 0)
                carry = (largest_ref[h], total_ref[h], mixed_ref[h])
                carry = _absorb(carry, q_ref[0, h, 0], k, v, seen, scale, axes, precision_of(q.dtype))
                largest_ref[h], total_ref[h], mixed_ref[h] = carry

        @pl.when(block == pl.num_programs(3) - 1)
        def _() -> None:
            for h in range(heads):
                y_ref[0, h, 0] = (mixed_ref[h] / jnp.maximum(total_ref[h], 1e-30)).astype(y_ref.dtype)

    def block_of(row: Any, tile: Any, block: Any, used: Any) -> Any:
        # a block that was fetched already is not fetched again
        return jnp.minimum(block, jnp.maximum(pl.cdiv(used[row, tile], n_cells) - 1, 0))

    def cells_of(stream: bool, cell_axis: int, size: int) -> Any:
        def index(row: Any, head: Any, tile: Any, block: Any, used: Any, _: Any) -> tuple[Any, ...]:
            at = block_of(row, tile, block, used)
            return (row if stream else 0, head, *((at, 0) if cell_axis == 0 else (0, at)))

        shape = (n_cells, size) if cell_axis == 0 else (size, n_cells)
        return pl.BlockSpec((1, heads, *shape), index)

    own = keys.shape[0] > 1
    n_scores = streams * n_kv * n_tiles * n_rows * sight.n_cells
    cell_bytes = k_size * keys.dtype.itemsize + v_size * values.dtype.itemsize
    tile_of = lambda row, head, tile, block, *_: (row, head, tile, 0, 0)  # noqa: E731
    y = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((*t.q.shape[:4], v_size), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(streams, n_kv // heads, n_tiles, -(-sight.n_cells // n_cells)),
            in_specs=[
                pl.BlockSpec((1, heads, 1, n_rows, k_size), tile_of),
                cells_of(own, axes[0], k_size),
                cells_of(own, axes[1], v_size),
                pl.BlockSpec(
                    (1, t.cells.shape[1], n_cells),
                    lambda row, head, tile, block, used, _: (row, 0, block_of(row, tile, block, used)),
                ),
            ],
            out_specs=pl.BlockSpec((1, heads, 1, n_rows, v_size), tile_of),
            scratch_shapes=[
                pltpu.VMEM((heads, n_rows, 1), jnp.float32),
                pltpu.VMEM((heads, n_rows, 1), jnp.float32),
                pltpu.VMEM((heads, n_rows, v_size), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n_scores * (k_size + v_size),
            transcendentals=n_scores,
            bytes_accessed=streams * n_kv * n_tiles * sight.n_cells * cell_bytes,
        ),
        interpret=interpret,
        name="attention",
    )(t.used, t.starts, t.q, keys, values, t.cells)
    return _from_tiles(y, rows, n_tokens, t.tokens)


@custom_vmap
def _in_main_memory(operand: Array) -> Array:
    """The operand of a kernel, left in HBM."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.with_memory_space_constraint(operand, pltpu.HBM)


@_in_main_memory.def_vmap
def _(axis_size: int, batched: list[bool], operand: Array) -> tuple[Array, bool]:
    del axis_size
    return _in_main_memory(operand), batched[0]


# -------------------------------------------------------------------------------------------- CUDA


def _fits_cuda(q: Array, keys: Array, values: Array, sight: Sight) -> bool:
    sizes = (keys.shape[3], values.shape[3])
    shapes = powers_of_2(sizes, 64, 256)
    return _dtypes_fit(q, keys, values) and shapes and q.shape[2] // keys.shape[1] <= _GPU_ROWS


def on_cuda(
    q: Array, keys: Array, values: Array, sight: Sight, scale: float, *, interpret: bool = False
) -> Array:
    """`attend` by Triton. Needs head sizes of 64, 128 or 256."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, n_tokens = q.shape[:2]
    t = _tiles(q, keys, sight, _GPU_ROWS)
    streams, n_kv, n_tiles, n_rows, k_size = t.q.shape
    v_size = values.shape[3]
    filled_rows = max(bucket(n_rows), 16)  # what the tensor cores take
    size = max(k_size, v_size)
    n_cells = min(max(_GPU_BLOCK_BYTES // (size * q.dtype.itemsize), 16), 128)
    # the sums of a split are written and read again: that must stay little beside its K/V
    most_splits = -(-sight.n_cells // max(2 * n_cells, 4 * n_rows))
    n_splits = max(min(_GPU_PROGRAMS // (streams * n_kv * n_tiles), most_splits), 1)

    alike = t.cells.shape[1] == 1

    def kernel(*refs: Any) -> None:
        used_ref, start_ref, q_ref, k_ref, v_ref, cells_ref, largest_ref, total_ref, mixed_ref = refs
        tile, split = pl.program_id(2) // n_splits, pl.program_id(2) % n_splits
        used, start = used_ref[()], start_ref[()] + tile * t.tokens
        real = (jnp.arange(filled_rows) < n_rows)[:, None]
        queries = triton.load(q_ref, mask=real, other=0)
        each = pl.cdiv(pl.cdiv(used, n_cells), n_splits)
        ends = jnp.minimum(pl.cdiv(used, n_cells), (split + 1) * each)

        def block(i: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            first = i * n_cells
            at = pl.ds(first, n_cells)
            filled = first + jnp.arange(n_cells) < used
            k, v = (
                triton.load(ref.at[at, :], mask=filled[:, None], other=0).astype(q.dtype)
                for ref in (k_ref, v_ref)
            )
            inside = filled[None] if alike else real & filled[None]
            cells = triton.load(cells_ref.at[:, at], mask=inside, other=-1)
            seen = _seen(cells, first, used, start, t.tokens, filled_rows, t.window)
            return _absorb(carry, queries, k, v, seen, scale, (0, 0), triton_precision(q.dtype, interpret))

        carry = (
            jnp.full((filled_rows, 1), _HIDDEN, jnp.float32),
            jnp.zeros((filled_rows, 1), jnp.float32),
            jnp.zeros((filled_rows, v_size), jnp.float32),
        )
        carry = lax.fori_loop(split * each, ends, block, carry)
        for ref, value in zip((largest_ref, total_ref, mixed_ref), carry, strict=True):
            triton.store(ref, value, mask=real)

    own = keys.shape[0] > 1

    def whole(shape: tuple[int, ...]) -> Any:
        return pl.BlockSpec((None, None, *shape[2:]), lambda row, head, _: (row if own else 0, head, 0, 0))

    def part(width: int) -> tuple[Any, jax.ShapeDtypeStruct]:
        """Of a split: its block and the whole."""
        block = pl.BlockSpec(
            (None, None, None, None, filled_rows, width),
            lambda row, head, i: (row, head, i // n_splits, i % n_splits, 0, 0),
        )
        shape = (streams, n_kv, n_tiles, n_splits, n_rows, width)
        return block, jax.ShapeDtypeStruct(shape, jnp.float32)

    parts = [part(1), part(1), part(v_size)]
    largest, total, mixed = pl.pallas_call(
        kernel,
        out_shape=[shape for _, shape in parts],
        grid=(streams, n_kv, n_tiles * n_splits),
        in_specs=[
            pl.BlockSpec((None, None), lambda row, head, i: (row, i // n_splits)),
            pl.BlockSpec((None,), lambda row, head, i: (row,)),
            pl.BlockSpec(
                (None, None, None, filled_rows, k_size), lambda row, head, i: (row, head, i // n_splits, 0, 0)
            ),
            whole(keys.shape),
            whole(values.shape),
            pl.BlockSpec(
                (None, 1 if alike else filled_rows, sight.n_cells), lambda row, head, i: (row, 0, 0)
            ),
        ],
        out_specs=[block for block, _ in parts],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention",
    )(t.used, t.starts, t.q, keys, values, t.cells)
    share = jnp.exp(largest - jnp.max(largest, axis=3, keepdims=True))
    y = jnp.sum(share * mixed, axis=3) / jnp.maximum(jnp.sum(share * total, axis=3), 1e-30)
    return _from_tiles(y.astype(q.dtype), rows, n_tokens, t.tokens)


def _dtypes_fit(q: Array, keys: Array, values: Array) -> bool:
    known = (jnp.bfloat16, jnp.float32)
    return all(array.dtype in known for array in (q, keys, values))


_KERNELS: dict[str, tuple[Callable[..., bool], Callable[..., Array]]] = {
    "tpu": (_fits_tpu, on_tpu),
    "cuda": (_fits_cuda, on_cuda),
}

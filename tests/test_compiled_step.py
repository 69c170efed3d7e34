"""What the reports on compiled steps count, on HLO written by hand and on real executables."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import aot_report  # noqa: E402
import aot_targets  # noqa: E402
from benchmark_workers import HYBRID_340M  # noqa: E402
from hlo_traffic import Traffic  # noqa: E402

TINY = HYBRID_340M | {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "shared_intermediate_size": 256,
}

MODULE = """HloModule m

%fused (p0: f32[1024,64], p1: s32[]) -> f32[1,64] {
  %p0 = f32[1024,64]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,64]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,64}
}

%written (w0: f32[1024,64], w1: f32[1,64], w2: s32[]) -> f32[1024,64] {
  %w0 = f32[1024,64]{1,0} parameter(0)
  %w1 = f32[1,64]{1,0} parameter(1)
  %w2 = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %all = f32[1024,64]{1,0} dynamic-update-slice(%w0, %w1, %w2, %nought)
}

%body (c: f32[1024,64]) -> f32[1024,64] {
  %c = f32[1024,64]{1,0} parameter(0)
  ROOT %double = f32[1024,64]{1,0} add(%c, %c)
}

%go (d: f32[1024,64]) -> pred[] {
  %d = f32[1024,64]{1,0} parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f32[1024,64], i: s32[]) -> f32[1024,64] {
  %a = f32[1024,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %read = f32[1,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused
  %near = f32[1024,64]{1,0:S(1)} copy(%a)
  %here = f32[1024,64]{1,0} copy(%a)
  %loop = f32[1024,64]{1,0} while(%here), condition=%go, body=%body
  ROOT %set = f32[1024,64]{1,0} fusion(%loop, %read, %i), kind=kLoop, calls=%written
}
"""


def test_traffic_counts_slices_updates_and_memories():
    whole, row = 1024 * 64 * 4, 64 * 4
    traffic = Traffic(MODULE)
    read = row + 4 + row  # the slice, its index, the result
    copies = whole + 2 * whole  # one arrives on the chip
    written = row + row + 4 + row  # what lies there, the row, the index, the update
    assert traffic.bytes == read + copies + written
    assert traffic.open_loops == 3 * whole  # an operand twice, and the result
    assert traffic.moves({whole}, ("copy",)) == 1
    assert traffic.n_kernels == 5


@pytest.mark.parametrize("name", aot_report.TARGETS)
def test_decode_leaves_its_cache_where_it_lies(name):
    if message := aot_targets.missing(name):
        pytest.skip(message)
    hparams = aot_report.hparams_from_config(TINY)
    executable, params, cache = aot_report.compile_step(aot_targets.target(name), hparams, 2, 1024)
    rows, _ = aot_report.figures(name, 2, executable, params, cache)
    found = {row["figure"].split(": ")[1]: row for row in rows}
    assert found["cache aliased"]["met"] and found["whole K/V buffers copied"]["met"]

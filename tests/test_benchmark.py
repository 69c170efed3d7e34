"""The benchmark scripts run, say what they left out, and compute their ratios and goals."""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import benchmark  # noqa: E402
import benchmark_gguf  # noqa: E402
import benchmark_suite  # noqa: E402
import gpu_benchmark  # noqa: E402
from benchmark_workers import Effort, NotRun, take_turns  # noqa: E402


def test_a_small_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    folder, written = tiny.write_folder(tmp_path / "model"), tmp_path / "figures.json"
    sizes = ["--batch", "1", "2", "--prompt", "8", "--tokens", "4", "--rounds", "2"]
    engines = ["--engines", "jaxhybrid", "llama.cpp"]
    assert benchmark.main(["--model", str(folder), *engines, *sizes, "--json", str(written)]) == 0
    out, err = capsys.readouterr()
    assert "| jaxhybrid |" in out and "llama.cpp left out" in err
    result = json.loads(written.read_text())
    assert list(result["skipped"]) == ["llama.cpp"]
    assert [(f["what"], f["batch"]) for f in result["figures"]] == [
        (what, rows) for what in ("prefill", "decode") for rows in (1, 2)
    ]
    for figure in result["figures"]:
        tokens = figure["batch"] * {"prefill": 8, "decode": 4}[figure["what"]]
        assert len(figure["seconds"]) == 2
        assert min(figure["seconds"]) <= tokens / figure["tokens_per_s"] <= max(figure["seconds"])


def test_ratios_are_to_each_peer():
    figures = [
        {"engine": name, "what": "decode", "batch": 1, "tokens_per_s": speed}
        for name, speed in (("jaxhybrid", 30.0), ("transformers", 10.0))
    ]
    lines = benchmark.table({"figures": figures}).splitlines()
    assert lines[-2:] == ["| jaxhybrid | 30.0 |", "| transformers | 10.0 (3.00 x) |"]


@pytest.mark.parametrize(
    "arguments",
    [["--model", "a", "--config", "b"], ["--python", "nothing"], ["--rounds", "0"], ["--engines", "x"]],
)
def test_wrong_use(arguments):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(arguments)
    assert caught.value.code == 2


def test_rows_know_their_goals_and_survive_a_missing_peer(tmp_path):
    suite = benchmark_suite.Suite("quick", {}, tmp_path / "rows.json")
    goals = [("a", 1.2, "higher"), ("b", 1.1, "lower"), ("c", 0, "lower")]
    with suite.rows_of(*goals):
        suite.add("a", 1.2, 1.2, "higher")
        suite.add("b", 1.2, 1.1, "lower")
        raise NotRun("no peer")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["figure"], row["met"]) for row in rows] == [("a", True), ("b", False), ("c", False)]
    assert rows[2]["value"] is None and rows[2]["note"] == "not run: no peer"
    assert "1 of 3 goals met" in benchmark_suite.table(suite.rows)


def test_a_slow_engine_sits_out():
    runs = {"fast": lambda: 1.0, "slow": lambda: time.sleep(0.2) or 2.0}
    assert take_turns(runs, Effort(rounds=3, seconds=0.5)) == {"fast": [1.0] * 3, "slow": [2.0]}


def test_gguf_names_and_decays():
    a_log = np.log(np.float32([1, 16]))
    ((name, decay),) = benchmark_gguf.renamed("model.layers.3.mamba.A_log", a_log, 1)
    assert name == "blk.3.ssm_a" and decay.shape == (2, 1)
    np.testing.assert_allclose(decay[:, 0], [-1, -16], rtol=1e-6)  # two roundings of float32
    gate_up = np.arange(4.0)[:, None]
    made = dict(benchmark_gguf.renamed("model.layers.0.shared_mlp.input_linear.weight", gate_up, 1))
    assert made["blk.0.ffn_gate.weight"].ravel().tolist() == [0, 1]
    assert made["blk.0.ffn_up.weight"].ravel().tolist() == [2, 3]


def test_the_accelerator_benchmark_keeps_rows_and_checks_the_cache(tmp_path, monkeypatch):
    sizes = ["--models", "tiny", "--batch", "2", "--tokens", "2", "--rounds", "1"]
    assert gpu_benchmark.main([*sizes, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [(check["dtype"], check["agrees"]) for check in written["agreement"]] == [
        ("float32", True),
        ("bfloat16", True),
    ]
    (row,) = written["rows"]
    assert row["aliased_bytes"] >= row["cache_bytes"] > 0 and row["tokens_per_s"] > 0
    monkeypatch.setattr(gpu_benchmark, "copy_bandwidth", lambda n_bytes: 1e9)  # measured already
    assert gpu_benchmark.main([*sizes, "--budget", "-1", "--out", str(tmp_path)]) == 1
    assert "not run" in (tmp_path / "gpu.md").read_text()
    assert gpu_benchmark.data_sheet("NVIDIA H100 80GB HBM3") == 3350e9
    assert gpu_benchmark.data_sheet("cpu") is None


def cut(params, bits):
    """Weights rounded to so many significant bits."""

    def rounded(x):
        mantissa, exponent = np.frexp(np.asarray(x, np.float32))
        return jnp.asarray(np.ldexp(np.round(mantissa * 2**bits) / 2**bits, exponent), x.dtype)

    return jax.tree.map(rounded, params)


@pytest.mark.parametrize(
    ("dtype", "harmless", "harmful"), [("float32", 22, 11), ("bfloat16", 8, 5)], ids=["float32", "bfloat16"]
)
def test_the_accelerator_benchmark_sees_products_of_too_few_bits(dtype, harmless, harmful, monkeypatch):
    logits_of = gpu_benchmark.logits_of
    cpu = jax.devices("cpu")[0]

    def agreement_of(bits):
        """With a device whose weights lose bits, which stands for products that do."""
        monkeypatch.setattr(
            gpu_benchmark,
            "logits_of",
            lambda params, device: logits_of(cut(params, bits) if device == "other" else params, cpu),
        )
        return gpu_benchmark.agreement(dtype, "other")

    assert agreement_of(harmless)["agrees"]
    found = agreement_of(harmful)
    assert not found["agrees"] and "error" not in found
    assert "| NO |" in gpu_benchmark.markdown(
        {"kind": "", "copy_bytes_per_s": 1, "data_sheet_bytes_per_s": None}, [found], []
    )


def test_the_accelerator_benchmark_says_what_it_could_not_compare(monkeypatch):
    nothing = {"prefill": np.ones((1, 2)), "decode": np.full((1, 2), np.nan)}
    monkeypatch.setattr(gpu_benchmark, "logits_of", lambda params, device: nothing)
    assert not gpu_benchmark.agreement("float32", jax.devices()[0])["agrees"]  # NaN agrees with nothing

    def fails(params, device):
        raise RuntimeError("no\nroom")

    monkeypatch.setattr(gpu_benchmark, "logits_of", fails)
    found = gpu_benchmark.agreement("float32", jax.devices()[0])
    assert found["error"] == "no room" and not found["agrees"]

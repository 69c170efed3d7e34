"""The benchmark script runs, says what it left out, and computes its ratios."""

import json
import sys
from pathlib import Path

import pytest
import tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import benchmark  # noqa: E402


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

"""Recorded operations give what they gave: logits of transformers, results and positions of a dict."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxhybrid as jh

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS.parent / "scripts"))

from replay_traces import Replay  # noqa: E402

TRACES = sorted(p.stem for p in (TESTS / "traces").glob("*.json"))


def replayed(name, change=None):
    path = TESTS / "traces" / f"{name}.json"
    trace = json.loads(path.read_text())
    if change:
        change(trace)
    params = jh.load_params(TESTS / "golden" / trace["model"])
    with np.load(path.with_suffix(".npz")) as logits:
        replay = Replay(params, trace, dict(logits), compare_logits=True)
    replay.run()
    return replay


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_replays(name):
    replay = replayed(name)
    assert replay.problems == []
    assert replay.rows > 8 and replay.worst < 5e-5  # as in test_parity.py


def test_a_difference_would_be_seen():
    def another_end(trace):
        trace["ops"][5]["pos_max"][0] += 1

    assert any("pos_max" in p for p in replayed("granitemoehybrid_dense-0", another_end).problems)

    def another_token(trace):
        op = next(op for op in trace["ops"] if op["op"] == "decode" and op["rc"] == 0 and any(op["output"]))
        op["tokens"][0] = (op["tokens"][0] + 1) % 96

    assert any("logits differ" in p for p in replayed("granitemoehybrid_dense-0", another_token).problems)

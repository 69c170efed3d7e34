"""Caches and sequences on disk: exact, into any layout, and nothing lost when something goes wrong."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from memory import KINDS, STATES, check_next, empty, ends, feed, name_of

import jaxhybrid as jh
from jaxhybrid.errors import CacheFullError, CheckpointError, RefusedError

kinds = pytest.mark.parametrize("kind", KINDS, ids=name_of)
TEXT = [3, 1, 4, 1, 5, 9]


def filled(kind, n_rollback=2):
    _, cache = feed(kind, empty(kind, n_rollback), {0: TEXT, 1: [7, 7]})
    return jh.fork(cache, 0, (2,))


def params_of(kind):
    return tiny.params(kind[0])


@kinds
def test_a_whole_cache_comes_back(kind, tmp_path):
    cache = filled(kind)
    cache, _ = jh.seq_rm(cache, 1, -1, -1)
    jh.save_cache(tmp_path / "cache", cache, params_of(kind))
    back = jh.load_cache(tmp_path / "cache", params_of(kind))
    chex.assert_trees_all_equal_shapes_and_dtypes(cache, back)
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    assert ends(back) == ends(cache)
    assert jh.restorable_positions(back, 0) == jh.restorable_positions(cache, 0)
    check_next(kind, back, {0: TEXT, 1: [], 2: TEXT})
    # what was removed is not on disk
    child = back.cell_children[0] if back.cell_children else None
    if child is not None:
        gone = np.asarray(child.positions < 0)[:, None, :, None]
        assert not np.any(np.where(gone, np.asarray(child.keys[0]), 0))


@kinds
def test_a_sequence_goes_into_any_layout(kind, tmp_path):
    cache = filled(kind)
    jh.save_sequence(tmp_path / "s", cache, 2, params_of(kind))
    assert ends(cache) == [5, 1, 5]
    for other in ((kind[0], not kind[1]), kind):
        # another size, other things in it, cells and slots in disorder
        target = empty(other, n_rollback=1, n_ctx=24)
        _, target = feed(other, target, {0: [8, 8, 8], 1: [2, 2, 2, 2]})
        target, _ = jh.seq_rm(target, 0, -1, -1)
        _, target = feed(other, target, {2: [6, 6]})
        loaded = jh.load_sequence(tmp_path / "s", target, 1, params_of(kind))
        assert ends(loaded) == [-1, 5, 1]
        check_next(other, loaded, {1: TEXT, 2: [6, 6]})
        back, ok = jh.seq_rm(loaded, 1, 5, -1)  # the newest snapshots came along
        assert bool(ok)
        check_next(other, back, {1: TEXT[:5]})
        again = jh.load_sequence(tmp_path / "s", loaded, 0, params_of(kind))
        check_next(other, again, {0: TEXT, 1: TEXT})


@kinds
def test_a_partial_file_takes_a_sequence_back(kind, tmp_path):
    cache = filled(kind, n_rollback=0)
    jh.save_sequence(tmp_path / "s", cache, 0, params_of(kind), partial=True)
    _, later = feed(kind, cache, {0: [2, 2, 2]})
    back = jh.load_sequence(tmp_path / "s", later, 0, params_of(kind))
    check_next(kind, back, {0: TEXT, 1: [7, 7]})
    if kind[0] != "recurrent":  # cells of another past are in the way
        with pytest.raises(RefusedError, match="no longer holds the past"):
            jh.load_sequence(tmp_path / "s", later, 1, params_of(kind))


@pytest.mark.parametrize("kind", STATES, ids=name_of)
def test_lossy_marks_and_empty_sequences_are_kept(kind, tmp_path):
    cache = filled(kind)
    cache, ok = jh.seq_rm(cache, 0, 1, 3, lossy=True)
    assert bool(ok)
    jh.save_sequence(tmp_path / "s", cache, 0, params_of(kind))
    loaded = jh.load_sequence(tmp_path / "s", empty(kind), 1, params_of(kind))
    assert bool(jh.is_lossy(loaded, 1)) and not jh.is_lossy(loaded, 0)
    jh.save_cache(tmp_path / "c", cache, params_of(kind))
    assert bool(jh.is_lossy(jh.load_cache(tmp_path / "c", params_of(kind)), 0))
    jh.save_sequence(tmp_path / "e", empty(kind), 0, params_of(kind))
    emptied = jh.load_sequence(tmp_path / "e", filled(kind), 0, params_of(kind))
    assert ends(emptied) == [-1, 1, 5]
    check_next(kind, emptied, {0: [], 1: [7, 7]})


# ------------------------------------------------------------------------------------- mismatches

HYBRID = ("hybrid", False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    jh.save_cache(folder / "cache", filled(HYBRID), params_of(HYBRID))
    jh.save_sequence(folder / "sequence", filled(HYBRID), 0, params_of(HYBRID))
    return folder


def other_model(**changes):
    hp = dataclasses.replace(tiny.hparams("hybrid"), **changes)
    return jh.init_params(hp, jax.random.key(7))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (tiny.params("recurrent"), "hparams.attention_layer_indices"),
        (other_model(norm_eps=1e-3), "hparams.norm_eps"),
        (other_model(family="mamba2"), "architecture"),
        (other_model(), "weights"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",
)
def test_a_file_of_another_model_names_the_field(saved, params, field):
    cache = jh.create_cache(params.hparams, 32, 3, cell_multiple=8)
    before = jax.tree.map(np.asarray, cache)
    with pytest.raises(CheckpointError, match=field):
        jh.load_cache(saved / "cache", params)
    with pytest.raises(CheckpointError, match=field):
        jh.load_sequence(saved / "sequence", cache, 0, params)
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, cache))


def test_weights_of_another_dtype_are_another_model(saved):
    params = params_of(HYBRID)
    halved = params.replace(tensors=jax.tree.map(lambda t: t.astype(jnp.bfloat16), params.tensors))
    with pytest.raises(CheckpointError, match="weights differs"):
        jh.load_cache(saved / "cache", halved)


def test_a_cache_that_cannot_hold_it_is_left_alone(saved):
    params = params_of(HYBRID)
    small = jh.create_cache(params.hparams, 16, 2, unified=True, cell_multiple=4)
    _, small = jh.decode(params, small, jh.Batch([1] * 12, seq_ids=[(1,)] * 12))
    with pytest.raises(CacheFullError, match="needs 6 cells, 4 of 16 are free"):
        jh.load_sequence(saved / "sequence", small, 0, params)
    roomy = jh.load_sequence(saved / "sequence", small, 1, params)  # it replaces what was in the way
    assert ends(roomy) == [-1, 5]
    with pytest.raises(RefusedError, match="sequence 2 is outside"):
        jh.load_sequence(saved / "sequence", small, 2, params)
    with pytest.raises(RefusedError, match="sequence -1 is outside"):
        jh.save_sequence(saved / "never", small, -1, params)
    wrong = jh.create_cache(params.hparams, 16, 2, cell_multiple=8, state_dtype=jnp.bfloat16)
    with pytest.raises(CheckpointError, match="saved as float32, this cache holds bfloat16"):
        jh.load_sequence(saved / "sequence", wrong, 0, params)


def test_kinds_of_files_are_told_apart(saved, tmp_path):
    params = params_of(HYBRID)
    with pytest.raises(CheckpointError, match="kind is 'sequence', not 'cache'"):
        jh.load_cache(saved / "sequence", params)
    with pytest.raises(CheckpointError, match="no saved cache here"):
        jh.load_cache(tmp_path / "nothing", params)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="holds other files .letter.txt."):
        jh.save_cache(tmp_path / "mine", filled(HYBRID), params)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        jh.save_cache(tmp_path / "file", filled(HYBRID), params)


# ---------------------------------------------------------------------------------------- damage


def damages(folder: Path):
    """Every file of the newest version cut, changed, or gone."""
    version = sorted(p for p in folder.iterdir())[-1]
    for path in sorted(p for p in version.rglob("*") if p.is_file()):
        data = path.read_bytes()
        yield path, data[: len(data) // 2]
        if data:
            yield path, data[:-1] + bytes([data[-1] ^ 1])
        yield path, None


def test_damage_anywhere_is_an_error_and_never_a_wrong_cache(saved, tmp_path):
    params, n = params_of(HYBRID), 0
    target = empty(HYBRID)
    for path, data in list(damages(saved / "sequence")):
        copy = tmp_path / str(n)
        shutil.copytree(saved / "sequence", copy)
        victim = copy / path.relative_to(saved / "sequence")
        victim.unlink() if data is None else victim.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            jh.load_sequence(copy, target, 0, params)
        assert "\n" not in str(caught.value) and str(copy) in str(caught.value)
        n += 1
    assert n > 20


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"kind": 5},
        {"about": {}},
        {"about": {"model": []}},
        {"arrays": {"lossy": ["float99", []]}},
        {"arrays": {}},
        {"files": {"../../x": [1, "a"]}},
        {"files": []},
    ],
    ids=str,
)
def test_a_forged_description_is_an_error(saved, tmp_path, change):
    import hashlib

    shutil.copytree(saved / "cache", tmp_path / "c")
    (about,) = (tmp_path / "c").glob("*/about.json")
    content = json.loads(about.read_text())["content"] | change
    text = json.dumps(content, sort_keys=True)
    about.write_text(json.dumps({"content": content, "sha256": hashlib.sha256(text.encode()).hexdigest()}))
    with pytest.raises(CheckpointError) as caught:
        jh.load_cache(tmp_path / "c", params_of(HYBRID))
    assert "\n" not in str(caught.value)


def test_saving_again_replaces_and_leftovers_go(tmp_path):
    params, path = params_of(HYBRID), tmp_path / "s"
    jh.save_sequence(path, filled(HYBRID), 0, params)
    (path / ".unfinished-999999-00000000").mkdir()  # of a process that is no more
    jh.save_sequence(path, filled(HYBRID), 1, params)
    assert [p.name for p in path.iterdir()] == ["00000002"]
    loaded = jh.load_sequence(path, empty(HYBRID), 0, params)
    assert ends(loaded)[0] == 1


def test_a_failing_disk_leaves_the_old_file(tmp_path, monkeypatch):
    from jaxhybrid.files import store

    params, path = params_of(HYBRID), tmp_path / "s"
    jh.save_sequence(path, filled(HYBRID), 0, params)

    def full(*_):
        raise OSError(28, "No space left on device")

    for broken in ("_save_arrays", "sync", "_publish"):
        with monkeypatch.context() as patch:
            patch.setattr(store, broken, full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                jh.save_sequence(path, filled(HYBRID), 1, params)
        assert [p.name for p in path.iterdir()] == ["00000001"]
        assert ends(jh.load_sequence(path, empty(HYBRID), 0, params))[0] == 5


WRITER = """
import sys
import numpy as np
from jaxhybrid.files import store
print("ready", flush=True)
n = 0
while True:
    n += 1
    store.write(sys.argv[1], "test", {"a": np.full((300, 300), n, np.float32), "n": np.asarray(n)}, {"n": n})
    print(n, flush=True)
"""


def test_a_killed_process_leaves_the_old_or_the_new(tmp_path):
    """SIGKILL at 20 moments of saving: what is read is whole, and never older than what was finished."""
    from jaxhybrid.files import store

    draw, path = np.random.default_rng(0), tmp_path / "s"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jh.__file__).parents[1])}
    seen = 0
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
            finished = int(writer.stdout.readline())
            for _ in range(3):  # while it writes on, every read is whole
                arrays, about = store.read(path, "test")
                assert np.all(arrays["a"] == about["n"]) and arrays["n"] == about["n"] >= finished
                seen += 1
            time.sleep(draw.uniform(0, 0.08))
            os.kill(writer.pid, signal.SIGKILL)
            rest = writer.stdout.read().split()
        finished = int(rest[-1]) if rest else finished
        arrays, about = store.read(path, "test")
        assert np.all(arrays["a"] == about["n"]) and finished <= about["n"] <= finished + 1
        seen += 1
    assert seen == 20


def test_a_version_that_vanishes_while_it_is_read(tmp_path, monkeypatch):
    """Another process saves a newer one meanwhile; a version that is damaged stays an error."""
    from jaxhybrid.files import store

    path, opened = tmp_path / "s", store._opened

    def save(n):
        store.write(path, "test", {"a": np.full(5, n, np.float32)}, {"n": n})

    def slow(folder):
        content = opened(folder)
        if content["about"]["n"] < 3:
            save(content["about"]["n"] + 1)
        return content

    save(1)
    monkeypatch.setattr(store, "_opened", slow)
    arrays, about = store.read(path, "test")
    assert about["n"] == 3 and np.all(arrays["a"] == 3)
    next(p for p in (path / "00000003" / "arrays").rglob("*") if p.is_file()).unlink()
    with pytest.raises(CheckpointError, match="damaged or missing"):
        store.read(path, "test")


# ------------------------------------------------------------------------------------ a failing step


@pytest.mark.parametrize("kind", [("hybrid", False), ("sliding_window", True)], ids=name_of)
def test_a_step_that_fails_in_the_middle_of_a_batch_loses_nothing(kind, monkeypatch):
    from jaxhybrid import driver

    _, cache = feed(kind, empty(kind), {0: TEXT})
    before = jax.tree.map(np.asarray, cache)
    calls, donating = [], driver.donating_step

    def fails(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")
        return donating(*args)

    monkeypatch.setattr(driver, "donating_step", fails)
    batch = jh.Batch([1] * 12)
    with pytest.raises(RuntimeError, match="the device is gone"):
        jh.decode(params_of(kind), cache, batch, n_ubatch=4)
    chex.assert_trees_all_equal(before, jax.tree.map(np.asarray, cache))
    monkeypatch.undo()
    _, after = jh.decode(params_of(kind), cache, batch, n_ubatch=4)
    check_next(kind, after, {0: [*TEXT, *[1] * 12]})

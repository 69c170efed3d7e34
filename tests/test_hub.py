"""The hub download, against a small local server that speaks enough of the hub's protocol."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from jaxhybrid.errors import CheckpointError, UsageError
from jaxhybrid.files.hub import resolve_model

ROOT = Path(__file__).parents[1]
# The hub library reads its environment at import, so each call that needs one gets a process.
DRIVER = """
import json, sys
from huggingface_hub import constants
from jaxhybrid.files.hub import resolve_model
constants.DOWNLOAD_CHUNK_SIZE = 16  # so that small files arrive in pieces
from jaxhybrid.errors import CheckpointError, UsageError
results = []
for model, options in json.loads(sys.argv[1]):
    try:
        results.append(["ok", str(resolve_model(model, progress=False, **options))])
    except (CheckpointError, UsageError) as error:
        results.append(["error", str(error)])
print(json.dumps(results))
"""
WEIGHTS = save({"w": np.arange(4, dtype=np.float32)})
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "added_tokens.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# words",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": WEIGHTS,
    "model.fp16.safetensors": WEIGHTS,
    "adapter_model.safetensors": WEIGHTS,
    "onnx/model.onnx": b"onnx",
    "onnx/model.safetensors": WEIGHTS,
}
WANTED = sorted(
    name
    for name in MODEL
    if name not in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors")
    and not name.startswith(("onnx/", "adapter_"))
)
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "w": "model-2.safetensors"}}
REPOS: dict[str, dict[str, bytes]] = {
    "owner/model": MODEL,
    "legacy": MODEL,
    "owner/gated": MODEL,
    "owner/gated-files": MODEL,
    "owner/forbidden": MODEL,
    "owner/broken": MODEL,
    "owner/pickled": {"config.json": MODEL["config.json"], "pytorch_model.bin": b"pickle"},
    "owner/half": {
        "config.json": MODEL["config.json"],
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        "model-2.safetensors": WEIGHTS,
    },
    "owner/data": {"train.csv": b"1,2"},
    "owner/quants": {
        "README.md": b"# words",
        "small-Q4_K_M.gguf": b"GGUF q4_k_m",
        "small-Q4_K_S.gguf": b"GGUF q4_k_s",
        "small-Q4_0.gguf": b"GGUF q4_0",
        "BF16/small-BF16-00001-of-00002.gguf": b"GGUF one",
        "BF16/small-BF16-00002-of-00002.gguf": b"GGUF two",
        "half-F32-00001-of-00002.gguf": b"GGUF one",
    },
}
REVISIONS = ("main", "v1.0", "refs/pr/7")
REFUSED = {
    "owner/gated": (403, "GatedRepo"),
    "owner/forbidden": (403, "Other"),
    "owner/broken": (500, ""),
}
SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.server.seen.append((self.command, unquote(path)))  # type: ignore[attr-defined]
        api = path.startswith("api/models/")
        path = path.removeprefix("api/models/")
        marks = ("/revision/", "/tree/") if api else ("/resolve/",)
        mark = next((mark for mark in marks if mark in path), None)
        repo, _, rest = path.partition(mark) if mark else (path, "", "")
        revision, name = (unquote(part) for part in rest.partition("/")[::2])
        if repo not in REPOS:
            return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repo in REFUSED:
            status, code = REFUSED[repo]
            return self.reply(status, b"{}", {"X-Error-Code": code})
        if revision not in (*REVISIONS, SHA):
            return self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = REPOS[repo]
        if mark == "/revision/":
            siblings = [{"rfilename": file} for file in files]
            info = {"id": repo, "sha": SHA, "siblings": siblings}
            return self.reply(200, json.dumps(info).encode(), {})
        if mark == "/tree/":
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": digest(data)}
                for file, data in files.items()
            ]
            return self.reply(200, json.dumps(tree).encode(), {})
        if repo == "owner/gated-files":
            return self.reply(401, b"", {"X-Error-Code": "GatedRepo"})
        if name in self.server.failing:  # type: ignore[attr-defined]
            time.sleep(0.5)  # meanwhile others, which are fetched side by side, are completed
            return self.reply(400, b"", {})  # the library tries 500 again, for half a minute
        if name not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = f'"{digest(files[name])}"'
        headers, data, status = {"ETag": etag, "X-Repo-Commit": SHA}, files[name], 200
        if start := self.headers.get("Range"):
            first = int(start.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            data, status = data[first:], 206
            self.server.ranges.append((name, first))  # type: ignore[attr-defined]
        self.reply(status, data, headers)

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            lost = self.server.lost  # type: ignore[attr-defined]
            name = unquote(self.path.rpartition("/")[2])
            if name in lost:
                lost.remove(name)
                data, self.close_connection = data[: len(data) // 2], True
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.ranges, server.lost, server.failing = [], [], [], []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def call(port: int, home: Path, *calls: tuple[str, dict[str, Any]], **more: str) -> list[list[str]]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
        **more,
    }
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(calls)],
        env=environment, cwd=home, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_download_takes_what_is_needed_and_the_cache_serves_offline(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    port = hub.server_address[1]
    calls = ("owner/model", {}), ("legacy", {"revision": SHA})
    results = call(port, tmp_path, *calls)
    assert [kind for kind, _ in results] == ["ok", "ok"], results
    for _, folder in results:
        files = [p for p in Path(folder).rglob("*") if p.is_file()]
        assert sorted(p.relative_to(folder).as_posix() for p in files) == WANTED
        assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    seen = hub.seen  # type: ignore[attr-defined]
    assert seen and not any("pytorch_model" in path or "onnx" in path for _, path in seen)

    hub.shutdown()
    hub.server_close()
    offline = [(model, {**options, "offline": True}) for model, options in calls]
    assert call(port, tmp_path, *calls, *offline) == results * 2
    assert call(port, tmp_path, *calls, HF_HUB_OFFLINE="1") == results


def test_refusals_say_what_to_do(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    expected = [
        ("owner/gated", {}, ["restricted", "hf auth login"]),
        ("owner/gated-files", {}, ["restricted", "hf auth login"]),
        ("owner/forbidden", {}, ["refused", "hf auth login"]),
        ("owner/missing", {}, ["no such model", "spelling"]),
        ("owner/model", {"revision": "v9"}, ["no revision 'v9'", "branches or tags"]),
        ("owner/model", {"offline": True}, ["not complete in the cache", "with the network"]),
        ("owner/broken", {}, ["500", "check the network"]),
        ("owner/pickled", {}, ["no *.safetensors", "choose a repository"]),
        ("owner/half", {}, ["model-00001-of-00002.safetensors", "not in the folder"]),
        ("owner/data", {}, ["no config.json", "choose a repository"]),
        ("owner/a--b", {}, ["not a valid hub id"]),
    ]
    results = call(hub.server_address[1], tmp_path, *((model, options) for model, options, _ in expected))
    for (model, _, words), (kind, text) in zip(expected, results, strict=True):
        assert kind == "error" and "\n" not in text, (model, text)
        assert model in text and all(word in text for word in words), (model, text)


def test_revisions_and_gguf_files_by_name(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    port = hub.server_address[1]
    quants = {
        "owner/quants/small-Q4_0.gguf": b"GGUF q4_0",
        "owner/quants:Q4_K_M": b"GGUF q4_k_m",
        "owner/quants:small-q4_k_s.gguf": b"GGUF q4_k_s",
        "owner/quants:bf16@v1.0": b"GGUF one",
        "owner/quants/BF16/small-BF16-00002-of-00002.gguf@main": b"GGUF one",
    }
    models = ["owner/model@v1.0", "owner/model@refs/pr/7", f"legacy@{SHA}"]
    wrong = {
        "owner/model@v9": ["no revision 'v9'", "branches or tags"],
        "owner/quants": ["no config.json", "name a .gguf file"],
        "owner/quants:Q4_K": ["no file is 'Q4_K'", "'small-Q4_0.gguf'"],
        "owner/quants:small": ["several files are 'small'", "name one"],
        "owner/quants/none.gguf": ["no file is 'none.gguf'"],
        "owner/quants:F32": ["not complete, 1 files are there"],
        "owner/data:Q8_0": ["no file is 'Q8_0' (there is no .gguf file)"],
        "owner/missing:Q8_0": ["no such model", "spelling"],
        "owner/gated/model-Q8_0.gguf": ["restricted", "hf auth login"],
        "owner/quants:../x.gguf": ["folder not found"],
    }
    results = call(port, tmp_path, *((name, {}) for name in (*quants, *models, *wrong)))
    for name, (kind, text) in zip((*quants, *models, *wrong), results, strict=True):
        if name in wrong:
            assert kind == "error" and "\n" not in text and all(w in text for w in wrong[name]), (name, text)
        elif name in quants:
            assert kind == "ok" and Path(text).read_bytes() == quants[name], (name, text)
        else:
            assert kind == "ok" and (Path(text) / "model.safetensors").read_bytes() == WEIGHTS
    assert (Path(results[3][1]).parent / "small-BF16-00002-of-00002.gguf").read_bytes() == b"GGUF two"
    hub.shutdown()
    hub.server_close()
    n = len(quants) + len(models)
    again = call(port, tmp_path, *((name, {}) for name in (*quants, *models)), HF_HUB_OFFLINE="1")
    assert again == results[:n]
    twice = call(port, tmp_path, ("owner/model@v1.0", {"revision": "main"}))
    assert twice[0][0] == "error" and "has a revision already" in twice[0][1]


def test_a_download_goes_on_where_the_connection_was_lost(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    hub.lost += ["model.safetensors", "tokenizer.json"]  # type: ignore[attr-defined]
    [[kind, folder]] = call(hub.server_address[1], tmp_path, ("owner/model", {}))
    assert kind == "ok" and (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    assert (Path(folder) / "tokenizer.json").read_bytes() == MODEL["tokenizer.json"]
    continued = dict(hub.ranges)  # type: ignore[attr-defined]
    assert 0 < continued["model.safetensors"] <= len(WEIGHTS) // 2


def test_files_that_are_complete_are_not_downloaded_again(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    port = hub.server_address[1]
    hub.failing.append("model.safetensors")  # type: ignore[attr-defined]
    [[kind, text]] = call(port, tmp_path, ("owner/model", {}))
    assert kind == "error" and "400" in text and "check the network" in text
    complete = {path.name for path in tmp_path.rglob(f"snapshots/{SHA}/*")}
    assert complete and complete < set(WANTED)
    del hub.failing[:]  # type: ignore[attr-defined]
    del hub.seen[:]  # type: ignore[attr-defined]
    [[kind, folder]] = call(port, tmp_path, ("owner/model", {}))
    fetched = [path for method, path in hub.seen if method == "GET" and "/resolve/" in path]  # type: ignore[attr-defined]
    assert kind == "ok" and {path.rpartition("/")[2] for path in fetched} == set(WANTED) - complete


def test_no_network_and_nothing_cached(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    port = hub.server_address[1]
    hub.shutdown()
    hub.server_close()
    [[kind, text]] = call(port, tmp_path, ("owner/model", {}))
    assert kind == "error" and "\n" not in text
    assert "cannot be downloaded" in text and "check the network" in text
    [[kind, text]] = call(port, tmp_path, ("owner/model", {}), HF_HUB_OFFLINE="1")
    assert kind == "error" and "\n" not in text and "run once with the network" in text


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ["disk full", "HF_HOME"]),
        (RuntimeError("xet: No space left on device (os error 28)"), ["disk full", "HF_HOME"]),
        (PermissionError(errno.EACCES, "Permission denied"), ["no permission", "HF_HOME"]),
        (RuntimeError("odd\nsecond line"), ["RuntimeError: odd", "check the network"]),
    ],
)
def test_faults_while_downloading(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, words: list[str]
) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise fault

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("owner/model")
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words)


def test_a_partial_download_does_not_replace_the_report_of_the_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def snapshot_download(*_: Any, local_files_only: bool, **__: Any) -> str:
        if local_files_only:
            return str(tmp_path)
        raise ConnectionError("connection lost")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(CheckpointError, match="connection lost"):
        resolve_model("owner/model")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    assert resolve_model("owner/model") == tmp_path


def test_progress_bars_are_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    during: list[bool] = []

    def snapshot_download(*_: Any, **__: Any) -> str:
        during.append(are_progress_bars_disabled())
        return str(tmp_path)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    before = are_progress_bars_disabled()
    resolve_model("owner/model", progress=False)
    resolve_model("owner/model")
    assert during == [True, before] and are_progress_bars_disabled() == before


def test_local_paths_never_reach_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == Path("owner/name")
    assert resolve_model("~/owner/name") == folder
    assert resolve_model(str(folder)) == folder
    (tmp_path / "owner" / "name@v1").mkdir()
    assert resolve_model("owner/name@v1") == Path("owner/name@v1")
    (tmp_path / "m.gguf").touch()
    assert resolve_model("m.gguf") == Path("m.gguf")
    with pytest.raises(UsageError, match="no revision"):
        resolve_model(str(folder), revision="main")
    (tmp_path / "m.txt").touch()
    assert resolve_model("m.gguf") == Path("m.gguf")
    with pytest.raises(UsageError, match="no revision"):
        resolve_model("m.gguf", revision="main")
    for model, words in {
        "m.txt": ["is a file", "give a .gguf file, or the folder"],
        "./missing": ["folder not found", "owner/name"],
        "owner/name/missing": ["folder not found"],
        "owner/missing.gguf": ["folder not found"],
        "owner\\name": ["folder not found"],
        "": ["folder not found"],
        "a\0b": ["folder not found"],
        "two\nlines": ["folder not found"],
        "x" * 5000 + "/": ["folder not found"],
        "https://huggingface.co/owner/name": ["address", "owner/name"],
    }.items():
        with pytest.raises(CheckpointError) as caught:
            resolve_model(model)
        text = str(caught.value)
        assert "\n" not in text and all(word in text for word in words), text

"""Every goal for speed, measured in one run: a row for each, as JSON, a table and a picture.

docs/benchmarks.md says what each row means and how to install the peers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark_workers import (
    HYBRID_340M,
    Effort,
    NotRun,
    Worker,
    medians,
    say,
    take_turns,
    why_unavailable,
    write_random_model,
)

THREADS = 2
EFFORTS = {"quick": Effort(rounds=3, seconds=12), "full": Effort(rounds=5, seconds=300)}
SHORT, N_TOKENS = 16, 16  # tokens before decoding, tokens decoded
CONTEXTS = (256, 4096, 16000)
RESERVED = (512, 32768)
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}
PEERS = ("llama.cpp", "transformers")
RECURRENT = HYBRID_340M | {"layer_types": ["mamba"] * 8, "num_hidden_layers": 8, "vocab_size": 4096}


@dataclass(frozen=True)
class Comparison:
    """jaxhybrid against the peers that have a goal, each with weights of the same dtype."""

    what: str
    rows: int
    n_prompt: int
    dtype: str
    goals: dict[str, float]
    full_only: tuple[str, ...] = ()

    def figure(self, peer: str) -> str:
        size = f"batch {self.rows}" if self.what == "decode" else f"{self.n_prompt} tokens"
        return f"{self.what} {size}, {GGUF_TYPES[self.dtype]}: jaxhybrid / {peer}"

    @property
    def n_tokens(self) -> int:
        return self.rows * (N_TOKENS if self.what == "decode" else self.n_prompt)


SLOWEST = ("transformers",)  # half a minute and more for one round of 2048 tokens, or of bfloat16
COMPARISONS = (
    Comparison("decode", 1, SHORT, "float32", {"llama.cpp": 1.0, "transformers": 4.0}),
    Comparison("decode", 8, SHORT, "float32", {"llama.cpp": 1.2, "transformers": 4.0}),
    Comparison("prefill", 1, 512, "float32", {"llama.cpp": 1.0, "transformers": 2.0}),
    Comparison("prefill", 1, 2048, "float32", {"llama.cpp": 1.0, "transformers": 2.0}, SLOWEST),
    Comparison("decode", 1, SHORT, "bfloat16", {"llama.cpp": 0.8, "transformers": 4.0}, SLOWEST),
    Comparison("prefill", 1, 512, "bfloat16", {"llama.cpp": 1.0, "transformers": 2.0}, SLOWEST),
    Comparison("prefill", 1, 2048, "bfloat16", {"llama.cpp": 1.0, "transformers": 2.0}, SLOWEST),
    Comparison("decode", 1, SHORT, "int8", {"llama.cpp": 0.8}),
)


@dataclass
class Row:
    """A figure and its goal. value is None where it was not measured; note says why, or what lies behind."""

    figure: str
    value: float | None
    goal: float
    better: str
    note: str = ""
    met: bool = field(init=False)

    def __post_init__(self) -> None:
        reached = self.value is not None and (
            self.value >= self.goal if self.better == "higher" else self.value <= self.goal
        )
        self.met = bool(reached)


class Suite:
    """The rows so far, written after each; `series` are the points of the picture, tokens/s."""

    def __init__(self, kind: str, interpreters: dict[str, str], json_path: Path | None) -> None:
        self.kind, self.effort, self.interpreters, self.json_path = (
            kind,
            EFFORTS[kind],
            interpreters,
            json_path,
        )
        self.rows: list[Row] = []
        self.series: dict[str, dict[str, dict[int, float]]] = {"context": {}, "batch": {}}

    def add(self, figure: str, value: float | None, goal: float, better: str, note: str = "") -> None:
        self.rows.append(Row(figure, value, goal, better, note))
        if self.json_path:
            rows = json.dumps([asdict(row) for row in self.rows], indent=2)
            self.json_path.write_text(rows + "\n", encoding="utf-8")

    @contextmanager
    def rows_of(self, *goals: tuple[str, float, str]) -> Iterator[None]:
        """Rows that the body adds; those it could not reach are added as not run."""
        say(goals[0][0].split(":")[0])
        try:
            yield
        except NotRun as error:
            done = {row.figure for row in self.rows}
            for figure, goal, better in goals:
                if figure not in done:
                    self.add(figure, None, goal, better, f"not run: {error}")

    def point(self, axis: str, engine: str, at: int, tokens_per_s: float) -> None:
        self.series[axis].setdefault(engine, {})[at] = tokens_per_s

    def peers(self, c: Comparison) -> list[str]:
        """Those that a comparison is made with."""
        return [peer for peer in c.goals if self.kind == "full" or peer not in c.full_only]

    def interpreter(self, engine: str) -> str:
        return self.interpreters.get(engine, sys.executable)


def run(kind: str, interpreters: dict[str, str], json_path: Path | None, plot_path: Path) -> None:
    """Measure everything; print the table, write JSON if a path is given, and the picture."""
    began = time.perf_counter()
    suite = Suite(kind, interpreters, json_path)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        say("writing random weights")
        subprocess.run([sys.executable, __file__, str(folder)], check=True)
        for dtype in GGUF_TYPES:
            with engines(suite, folder, dtype) as workers:
                if dtype == "float32":
                    same_model(suite, workers)
                    contexts(suite, workers)
                for comparison in COMPARISONS:
                    if comparison.dtype == dtype:
                        compare(suite, comparison, workers)
        recurrent_only(suite, folder)
        loading(suite, folder)
    first_token(suite)
    with ThreadPoolExecutor() as pool:  # neither is timed, so they run side by side
        report = pool.submit(_compile_ahead, suite)
        compilations(suite)
        compiled_ahead(suite, report)
    print(table(suite.rows))
    print(f"\n{draw(suite.series, plot_path)}; {time.perf_counter() - began:.0f} s in all")


# --------------------------------------------------------------------------------------------- engines


Workers = dict[str, Worker | NotRun]


@contextmanager
def engines(suite: Suite, folder: Path, dtype: str) -> Iterator[Workers]:
    """jaxhybrid and the peers with weights of this dtype, or why they are not there."""
    wanted = {"jaxhybrid"} | {p for c in COMPARISONS if c.dtype == dtype for p in suite.peers(c)}
    workers: Workers = {}
    try:
        for name in sorted(wanted):
            try:
                workers[name] = _start(suite, name, folder, dtype)
            except NotRun as error:
                say(f"{name}, {dtype}: {error}")
                workers[name] = error
        yield workers
    finally:
        for worker in workers.values():
            if isinstance(worker, Worker):
                worker.stop()
        (folder / "model.gguf").unlink(missing_ok=True)


def _start(suite: Suite, name: str, folder: Path, dtype: str) -> Worker:
    interpreter = suite.interpreter(name)
    reason = why_unavailable(name, interpreter)
    if reason:
        raise NotRun(reason)
    arguments = ["--folder", str(folder / "hybrid"), "--dtype", dtype]
    if name == "llama.cpp":
        file = folder / "model.gguf"
        script = str(Path(__file__).with_name("benchmark_gguf.py"))
        call([interpreter, script, str(folder / "hybrid"), str(file), "--type", GGUF_TYPES[dtype]])
        arguments += ["--gguf", str(file)]
    worker = Worker(name, interpreter, arguments, THREADS)
    if name != "jaxhybrid":  # which is warmed up for each shape, since it compiles
        worker.ask("decode", rows=1, n_prompt=4, n_tokens=1)
    return worker


def call(command: list[str], timeout: float = 600) -> str:
    """The standard output of a command; NotRun with its last words if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise NotRun(f"{Path(command[1]).name} took more than {timeout:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NotRun(f"{Path(command[1]).name} ended with {done.returncode}: {last[:200]}")
    return done.stdout


def alone(*arguments: str) -> dict[str, Any]:
    return json.loads(call([sys.executable, str(Path(__file__).with_name("benchmark_alone.py")), *arguments]))


def _worker(workers: Workers, name: str) -> Worker:
    found = workers[name]
    if isinstance(found, NotRun):
        raise found
    return found


# ------------------------------------------------------------------------------------------ measurements


def same_model(suite: Suite, workers: Workers) -> None:
    for peer in PEERS:
        goal = (f"logits of a short prompt, f32: largest difference to {peer}", 1e-3, "lower")
        with suite.rows_of(goal):
            theirs = _worker(workers, peer).ask("logits")
            ours = _worker(workers, "jaxhybrid").ask("logits")
            worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            suite.add(goal[0], worst, goal[1], goal[2], "both run the same model")


def compare(suite: Suite, c: Comparison, workers: Workers) -> None:
    peers = suite.peers(c)
    with suite.rows_of(*((c.figure(peer), c.goals[peer], "higher") for peer in peers)):
        keywords: dict[str, Any] = {"rows": c.rows, "n_prompt": c.n_prompt}
        if c.what == "decode":
            keywords["n_tokens"] = N_TOKENS
        _worker(workers, "jaxhybrid").ask(c.what, **keywords)  # compiles
        runs: dict[str, Callable[[], float]] = {}
        for name in ("jaxhybrid", *peers):
            worker = workers[name]
            if isinstance(worker, Worker):
                runs[name] = lambda worker=worker: worker.ask(c.what, **keywords)
                if name == "llama.cpp" and c.what == "decode" and c.rows > 1:
                    runs["llama.cpp, kv_unified"] = lambda worker=worker: worker.ask(
                        c.what, unified=True, **keywords
                    )
        speeds = {name: c.n_tokens / t for name, t in medians(take_turns(runs, suite.effort)).items()}
        settings = [name for name in speeds if name.startswith("llama.cpp")]
        best = max(settings, key=speeds.__getitem__, default="")
        for peer in peers:
            worker = workers[peer]
            if isinstance(worker, NotRun):
                suite.add(c.figure(peer), None, c.goals[peer], "higher", f"not run: {worker}")
                continue
            theirs = best if peer == "llama.cpp" else peer
            note = f"{speeds['jaxhybrid']:.1f} against {speeds[theirs]:.1f} tok/s of {theirs}"
            suite.add(c.figure(peer), speeds["jaxhybrid"] / speeds[theirs], c.goals[peer], "higher", note)
        if c.what == "decode" and c.dtype == "float32":
            for name in ("jaxhybrid", *peers):
                if isinstance(workers[name], Worker):
                    theirs = best if name == "llama.cpp" else name
                    suite.point("batch", name, c.rows, speeds[theirs])
                    if c.rows == 1:
                        suite.point("context", name, c.n_prompt, speeds[theirs])


def contexts(suite: Suite, workers: Workers) -> None:
    """Decode at different lengths of context, and with more room than is used; and the picture's points."""
    grows = ("decode at 16k of context, f32: growth over 256 / time to read the K/V", 1.0, "lower")
    room = ("decode of 256 tokens with 32768 reserved, f32: time / that with 512", 1.1, "lower")
    with suite.rows_of(grows, room):
        ours = _worker(workers, "jaxhybrid")

        def decode(context: int, n_ctx: int) -> float:
            sizes = {"made_up": context - SHORT - N_TOKENS, "n_prompt": SHORT, "n_tokens": N_TOKENS}
            return ours.ask("decode", rows=1, n_ctx=n_ctx, **sizes) / N_TOKENS

        runs: dict[str, Callable[[], float]] = {
            f"at {context}": lambda context=context: decode(context, 16384) for context in CONTEXTS
        }
        runs |= {f"of {n_ctx}": lambda n_ctx=n_ctx: decode(256, n_ctx) for n_ctx in RESERVED}
        for warm_up in runs.values():
            warm_up()
        found = take_turns(runs, Effort(3 * suite.effort.rounds, 2 * suite.effort.seconds))
        middle = medians(found)
        bandwidth = ours.ask("bandwidth")
        extra = (CONTEXTS[-1] - CONTEXTS[0]) * ours.ask("bytes_per_token")
        grown, allowed = middle["at 16000"] - middle["at 256"], extra / bandwidth
        suite.add(
            grows[0],
            grown / allowed,
            grows[1],
            grows[2],
            f"{1e3 * middle['at 256']:.1f} to {1e3 * middle['at 16000']:.1f} ms a token; "
            f"{extra / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s are {1e3 * allowed:.1f} ms",
        )
        least, most = middle["of 512"], middle["of 32768"]
        note = f"{1e3 * most:.1f} against {1e3 * least:.1f} ms a token"
        suite.add(room[0], most / least, room[1], room[2], note)
        for context in CONTEXTS:
            suite.point("context", "jaxhybrid", context, 1 / middle[f"at {context}"])
        more = {"n_tokens": N_TOKENS}
        for rows in (2, 4, 16) if suite.kind == "full" else ():
            for name, worker in workers.items():
                if isinstance(worker, Worker) and name in ("jaxhybrid", "llama.cpp"):
                    worker.ask("decode", rows=rows, n_prompt=SHORT, n_tokens=1)
                    seconds = worker.ask("decode", rows=rows, n_prompt=SHORT, **more)
                    suite.point("batch", name, rows, rows * N_TOKENS / seconds)
        theirs = workers["llama.cpp"]
        for context in (1024, 4096, 8192) if suite.kind == "full" else (1024,):
            if isinstance(theirs, Worker):
                seconds = theirs.ask("decode", rows=1, n_prompt=context - N_TOKENS, **more)
                suite.point("context", "llama.cpp", context, N_TOKENS / seconds)


def recurrent_only(suite: Suite, folder: Path) -> None:
    goal = ("decode at 16k of context, recurrent only, f32: time / that at 256", 1.05, "lower")
    with suite.rows_of(goal):
        worker = Worker("jaxhybrid", sys.executable, ["--folder", str(folder / "recurrent")], THREADS)
        try:
            n_tokens = 4 * N_TOKENS
            sizes = {"rows": 1, "n_prompt": SHORT, "n_tokens": n_tokens}
            runs: dict[str, Callable[[], float]] = {
                str(context): lambda context=context: worker.ask("decode", made_up=context, **sizes)
                for context in (CONTEXTS[0], CONTEXTS[-1])
            }
            for warm_up in runs.values():
                warm_up()
            found = take_turns(runs, Effort(5 * suite.effort.rounds, suite.effort.seconds))
        finally:
            worker.stop()
        short, long = medians(found).values()
        note = f"{1e3 * short / n_tokens:.2f} and {1e3 * long / n_tokens:.2f} ms a token, "
        suite.add(goal[0], long / short, goal[1], goal[2], note + f"medians of {len(found['256'])} rounds")


def loading(suite: Suite, folder: Path) -> None:
    peak = ("loading 1.4 GB, f32: growth of memory at the peak / file", 1.1, "lower")
    seconds = ("loading 1.4 GB, f32: time / reading the file", 1.5, "lower")
    with suite.rows_of(peak, seconds):
        got = alone("load", str(folder / "hybrid"))
        size = got["file_bytes"]
        grown, own = got["peak_bytes"] / 1e9, got["anonymous_bytes"] / 1e9
        note = f"{grown:.2f} GB, {own:.2f} GB of it not of the mapped file; the file has {size / 1e9:.2f} GB"
        suite.add(peak[0], got["peak_bytes"] / size, peak[1], peak[2], note)
        note = f"{got['load_s']:.1f} against {got['read_s']:.1f} s, page cache warm for both"
        suite.add(seconds[0], got["load_s"] / got["read_s"], seconds[1], seconds[2], note)


def first_token(suite: Suite) -> None:
    goal = ("second start of the command: seconds to the first text", 3.0, "lower")
    with suite.rows_of(goal):
        got = alone("start")
        note = f"{got['second_compile']}; first start {got['first_s']:.1f} s, {got['first_compile']}"
        suite.add(goal[0], got["second_s"], goal[1], goal[2], note)


def compilations(suite: Suite) -> None:
    goal = ("compilations in 1000 random batches after warm-up", 0, "lower")
    with suite.rows_of(goal):
        got = alone("compilations", "1000")
        after, before = got["after"], sum(got["warm_up"].values())
        names = ", ".join(f"{n} of {name}" for name, n in after.items()) or "none"
        note = f"{names}; the warm-up compiled {before} in {got['warm_up_s']:.0f} s"
        suite.add(goal[0], sum(after.values()), goal[1], goal[2], note)


def _compile_ahead(suite: Suite) -> list[dict[str, Any]]:
    """The rows of aot_report.py, which compiles for machines that are not there."""
    batches = ["1", "8", "64"] if suite.kind == "full" else ["8"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "aot.json"
        script = Path(__file__).with_name("aot_report.py")
        command = [suite.interpreter("aot"), str(script), "--json", str(file)]
        call(
            [*command, "--targets", "v5e", "h100", "--batch", *batches],
            timeout=1200 if suite.kind == "full" else 120,
        )
        return json.loads(file.read_text(encoding="utf-8"))


def compiled_ahead(suite: Suite, report: Future[list[dict[str, Any]]]) -> None:
    with suite.rows_of(("programs compiled ahead for v5e and h100", 0, "lower")):
        for row in report.result():
            suite.add(row["figure"], row["value"], row["goal"], row["better"], row.get("note", ""))


# ----------------------------------------------------------------------------------------------- output


def table(rows: list[Row]) -> str:
    lines = ["| figure | value | goal | met | |", "|---|---|---|---|---|"]
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.4g}"
        sign = ">=" if row.better == "higher" else "<="
        met = "yes" if row.met else "NO"
        lines.append(f"| {row.figure} | {value} | {sign} {row.goal:g} | {met} | {row.note} |")
    return "\n".join([*lines, f"\n{sum(row.met for row in rows)} of {len(rows)} goals met"])


def draw(series: dict[str, dict[str, dict[int, float]]], path: Path) -> str:
    """Decode speed against context and batch as a PNG; says where it is, or why there is none."""
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "no picture: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    labels = {"context": "tokens of context, batch 1", "batch": "rows, short context"}
    colours = {"jaxhybrid": "C0", "llama.cpp": "C1", "transformers": "C2"}
    for axis, (name, lines) in zip(axes, series.items(), strict=True):
        for engine, points in lines.items():
            at = sorted(points)
            axis.plot(at, [points[x] for x in at], marker="o", label=engine, color=colours[engine])
        ticks = sorted({x for points in lines.values() for x in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(x) for x in ticks])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_xlabel(labels[name])
        axis.set_ylabel("decoded tokens/s")
        axis.grid(alpha=0.3)
        if lines:
            axis.legend()
    figure.suptitle("Decoding, 340M hybrid, float32, 2 threads")
    figure.savefig(path, dpi=120)
    return f"picture: {path}"


def main() -> int:
    """Write the models of the suite, in a process whose memory is given back."""
    folder = Path(sys.argv[1])
    write_random_model(HYBRID_340M, folder / "hybrid")
    write_random_model(RECURRENT, folder / "recurrent")
    return 0


if __name__ == "__main__":
    sys.exit(main())

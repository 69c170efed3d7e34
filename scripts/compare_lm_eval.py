"""Compare the lm-eval model class with lm-eval's own Hugging Face model, request by request.

    python scripts/compare_lm_eval.py [MODEL_FOLDER]

Needs lm-eval[hf] (torch, transformers) beside jaxhybrid, and no network: three small tasks are made from the
README (multiple choice with examples, rolling log-likelihood of long texts, generation). Prints the largest
differences and fails where they exceed what float32 sums explain.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

PARAGRAPHS = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").split("\n\n")
TOLERANCE = 2e-4  # of a log-likelihood, relative to its size and at least absolute

TASKS = {
    "local_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "num_fewshot": 2,
        "fewshot_split": "train",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def documents() -> list[dict[str, Any]]:
    """Questions with four answers, and long texts; the last text is longer than most contexts."""
    words = " ".join(PARAGRAPHS).split()
    found = []
    for i in range(12):
        start = 40 * i
        choices = [" ".join(words[k : k + 1 + i % 5]) for k in range(start + 10, start + 26, 4)]
        found.append(
            {
                "question": " ".join(words[start : start + 10]),
                "choices": choices,
                "answer": i % 4,
                "text": " ".join(words[start : start + 60 * (1 + 4 * (i == 11))]),
            }
        )
    return found


def write_tasks(folder: Path) -> None:
    """The documents and a YAML file for each task (JSON is YAML)."""
    lines = "".join(json.dumps(d) + "\n" for d in documents())
    (folder / "documents.jsonl").write_text(lines, encoding="utf-8")
    files = {split: str(folder / "documents.jsonl") for split in ("train", "test")}
    for name, task in TASKS.items():
        shared = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}}
        shared |= {"test_split": "test", "metadata": {"version": 1}}
        (folder / f"{name}.yaml").write_text(json.dumps(shared | task), encoding="utf-8")


def evaluate(model: Any, folder: Path) -> dict[str, list[Any]]:
    """The answers of each task's requests, in order of the documents."""
    lm_eval: Any = importlib.import_module("lm_eval")
    tasks: Any = importlib.import_module("lm_eval.tasks")
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    assert results is not None
    print({name: {k: v for k, v in r.items() if "," in k} for name, r in results["results"].items()})
    return {
        name: [s["resps"] for s in sorted(samples, key=lambda s: s["doc_id"])]
        for name, samples in results["samples"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with lm-eval's own Hugging Face model.")
    parser.add_argument("model", nargs="?", help="a Hugging Face folder (default: the model in the package)")
    parser.add_argument("--max-length", type=int, default=256, help="short, so that texts need windows")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    importlib.import_module("lm_eval.models")
    hugging_face: Any = importlib.import_module("lm_eval.models.huggingface")

    from jaxhybrid.engine import embedded_folder
    from jaxhybrid.harness import JaxHybridLM

    folder = args.model or str(embedded_folder())
    with tempfile.TemporaryDirectory() as tasks:
        write_tasks(Path(tasks))
        common: dict[str, Any] = {"dtype": "float32", "max_length": args.max_length, "batch_size": 4}
        ours = evaluate(JaxHybridLM(pretrained=folder, **common), Path(tasks))
        theirs = evaluate(hugging_face.HFLM(pretrained=folder, device="cpu", **common), Path(tasks))
    worst, greedy, n = 0.0, 0, 0
    for name in ("local_choice", "local_rolling"):
        for mine, other in zip(flat(ours[name]), flat(theirs[name]), strict=True):
            if isinstance(mine, bool):
                greedy += mine != other
            else:
                worst = max(worst, abs(mine - other) / max(1.0, abs(other)))
                n += 1
    texts = list(zip(flat(ours["local_generation"]), flat(theirs["local_generation"]), strict=True))
    same = sum(a == b for a, b in texts)
    print(f"{n} log-likelihoods: largest relative difference {worst:.1e}; {greedy} greedy marks differ")
    print(f"{same} of {len(texts)} generated texts are equal")
    if worst > TOLERANCE or greedy or same != len(texts):
        raise SystemExit("error: the two differ by more than rounding")


def flat(values: Any) -> list[Any]:
    """Numbers, marks and texts of nested lists, in order."""
    if isinstance(values, list | tuple):
        return [x for value in values for x in flat(value)]
    if isinstance(values, str) and values in ("True", "False"):
        return [values == "True"]
    try:
        return [float(values)] if not isinstance(values, bool) else [values]
    except (TypeError, ValueError):
        return [values]


if __name__ == "__main__":
    main()

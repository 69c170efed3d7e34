"""Does a GGUF file give the same text, logits and perplexity here as in llama.cpp?

    python scripts/compare_gguf.py MODEL.gguf --text TEXTFILE

Needs llama-cpp-python, which runs the file re-quantized to float32 (written beside it, unless it is there),
so that both sides multiply the same numbers: llama.cpp rounds activations where weights are quantized. Greedy
text is compared token by token over ten prompts; where two differ, the gap between the two best logits is
printed. Perplexity is over windows of the text, each from an empty cache. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The three primary colours are",
    "In 1969, the first man",
    "To make bread you need flour,",
    "List of planets: Mercury,",
    "Dear Sir or Madam,",
    "The meaning of life is",
)
NEAR_TIE = 1e-2


def in_llama_cpp(model: Path, text: Path, n_new: int, n_text: int, window: int) -> dict[str, Any]:
    """Greedy tokens with the gaps of their logits, and the log probabilities of the text's tokens."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    llm = llama_cpp.Llama(str(model), n_ctx=window, n_batch=window, logits_all=True, verbose=False)
    greedy = []
    for prompt in PROMPTS:
        ids = llm.tokenize(prompt.encode(), special=True)
        llm.reset()
        llm.eval(ids)
        new, gaps = [], []
        for _ in range(n_new):
            logits = np.array(llm.scores[llm.n_tokens - 1])
            first, second = np.sort(logits)[[-1, -2]]
            new.append(int(np.argmax(logits)))
            gaps.append(float(first - second))
            llm.eval([new[-1]])
        greedy.append({"prompt": ids, "tokens": new, "gaps": gaps})
    ids = llm.tokenize(text.read_bytes(), add_bos=False, special=False)[:n_text]
    losses = []
    for first in range(0, len(ids) - window + 1, window):
        llm.reset()
        llm.eval(ids[first : first + window])
        losses += nll(np.array(llm.scores[:window]), ids[first : first + window])
    return {"greedy": greedy, "ids": ids, "losses": losses}


def in_jaxhybrid(model: Path, text: Path, theirs: dict[str, Any], n_new: int, window: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    import jaxhybrid as jh

    loaded = jh.load(model, dtype=jnp.float32)
    params, tokenizer = loaded.params, loaded.tokenizer
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    results = jh.generate(loaded, prompts, max_tokens=n_new, ignore_eos=True)
    whole = tokenizer.encode(text.read_text(), add_special_tokens=False)
    forward = jax.jit(jh.forward)
    losses, ids = [], theirs["ids"]
    for first in range(0, len(ids) - window + 1, window):
        some = ids[first : first + window]
        losses += nll(np.asarray(forward(params, jnp.asarray([some], jnp.int32))[0]), some)
    return {
        "greedy": [{"prompt": p, "tokens": r.tokens} for p, r in zip(prompts, results, strict=True)],
        "ids": whole[: len(ids)],
        "losses": losses,
        "load_seconds": loaded.load_seconds,
        "weight_bytes": loaded.weight_bytes,
    }


def nll(logits: np.ndarray, ids: list[int]) -> list[float]:
    """Of each token but the first, given those before."""
    x = logits.astype(np.float64)[:-1]
    top = x.max(axis=-1, keepdims=True)
    norms = np.log(np.exp(x - top).sum(axis=-1)) + top[:, 0]
    return (norms - x[np.arange(len(x)), ids[1:]]).tolist()


def to_float32(model: Path, path: Path) -> None:
    import llama_cpp  # pyright: ignore[reportMissingImports]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_ALL_F32, True
    if llama_cpp.llama_model_quantize(str(model).encode(), str(path).encode(), ctypes.byref(params)):
        raise SystemExit(f"{model}: cannot be re-quantized to {path}")


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    first_gaps, same = [], 0
    for a, b in zip(theirs["greedy"], ours["greedy"], strict=True):
        pairs = zip(a["tokens"], b["tokens"], strict=True)
        where = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        same += where is None
        if where is not None:
            first_gaps.append({"token": where, "gap": a["gaps"][where]})
    mean = [float(np.exp(np.mean(side["losses"]))) for side in (theirs, ours)]
    return {
        "prompts_tokenized_equally": sum(
            a["prompt"] == b["prompt"] for a, b in zip(theirs["greedy"], ours["greedy"], strict=True)
        ),
        "equal_continuations": same,
        "first_differences": first_gaps,
        "only_near_ties": all(d["gap"] < NEAR_TIE for d in first_gaps),
        "text_tokens": len(theirs["ids"]),
        "text_tokenized_equally": theirs["ids"] == ours["ids"],
        "perplexity_llama_cpp": mean[0],
        "perplexity_jaxhybrid": mean[1],
        "perplexity_ratio_minus_1": mean[1] / mean[0] - 1,
        "largest_difference_of_a_log_probability": float(
            np.max(np.abs(np.subtract(theirs["losses"], ours["losses"])))
        ),
        "load_seconds": ours["load_seconds"],
        "weight_bytes": ours["weight_bytes"],
        "peak_bytes": ours["peak_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a text of at least --tokens tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens to continue each prompt by")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--side", choices=["llama", "jaxhybrid"], help=argparse.SUPPRESS)
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    plain = args.model.with_suffix(".f32.gguf")
    if args.side == "llama":
        if not plain.exists():
            to_float32(args.model, plain)
        json.dump(in_llama_cpp(plain, args.text, args.new, args.tokens, args.window), sys.stdout)
        return
    if args.side == "jaxhybrid":
        theirs = json.loads(args.theirs.read_text())
        found = in_jaxhybrid(args.model, args.text, theirs, args.new, args.window)
        found["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        json.dump(found, sys.stdout)
        return
    same = [__file__, str(args.model), "--text", str(args.text), "--new", str(args.new)]
    same += ["--tokens", str(args.tokens), "--window", str(args.window)]

    def side(python: str, *more: str) -> str:
        return subprocess.run([python, *same, *more], check=True, stdout=subprocess.PIPE, text=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "theirs.json"
        file.write_text(side(args.llama_python, "--side", "llama"))
        ours = json.loads(side(sys.executable, "--side", "jaxhybrid", "--theirs", str(file)))
        print(json.dumps(compare(json.loads(file.read_text()), ours), indent=1))


if __name__ == "__main__":
    main()

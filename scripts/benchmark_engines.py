"""What the benchmark measures of each engine, and the process that an engine lives in.

Each answers `prefill` and `decode` in seconds, and `logits`; JaxHybrid also what only concerns itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Protocol

CHECK_PROMPT = 24  # tokens of the prompt whose logits must agree


class Engine(Protocol):
    """`prefill` and `decode` return seconds; `decode` those of the tokens after a prefix of `n_prompt`."""

    def prefill(self, rows: int, n_prompt: int) -> float: ...
    def decode(self, rows: int, n_prompt: int, n_tokens: int) -> float: ...
    def logits(self) -> list[float]: ...


def prompt_tokens(vocab: int, row: int, n: int) -> list[int]:
    return [(1 + 7919 * (i + 1) * (row + 3)) % vocab for i in range(n)]


class JaxHybrid:
    def __init__(self, args: argparse.Namespace) -> None:
        import jax

        import jaxhybrid

        self.jax, self.jh, self.ubatch = jax, jaxhybrid, args.ubatch
        if args.dtype == "int8":
            self.params = jaxhybrid.load_params(args.folder, quantize="int8")
        else:
            self.params = jaxhybrid.load_params(args.folder, args.dtype)

    def _prefilled(self, rows: int, n_prompt: int, n_ctx: int) -> tuple[float, Any, Any]:
        hp = self.params.hparams
        cache = self.jh.create_cache(hp, n_ctx, rows, dtype=self.params.dtype)
        prompts = [prompt_tokens(hp.vocab_size, row, n_prompt) for row in range(rows)]
        batch = self.jh.Batch(
            tokens=[token for prompt in prompts for token in prompt],
            seq_ids=[(row,) for row in range(rows) for _ in range(n_prompt)],
        )
        self.jax.block_until_ready(cache)
        began = time.perf_counter()
        logits, cache = self.jh.decode(self.params, cache, batch, n_ubatch=self.ubatch, donate=True)
        self.jax.block_until_ready((logits, cache))
        return time.perf_counter() - began, logits, cache

    def prefill(self, rows: int, n_prompt: int) -> float:
        return self._prefilled(rows, n_prompt, n_prompt + 1)[0]

    def logits(self) -> list[float]:
        return self._prefilled(1, CHECK_PROMPT, CHECK_PROMPT)[1][0].tolist()

    def decode(
        self, rows: int, n_prompt: int, n_tokens: int, n_ctx: int | None = None, made_up: int = 0
    ) -> float:
        """n_ctx: tokens the cache has room for, None for just enough. made_up: tokens before the prompt whose
        K/V are random numbers instead of computed ones, which take as long to read."""
        from jaxhybrid import token_loop
        from jaxhybrid.driver import context_bucket
        from jaxhybrid.sampling import make_sampling

        first = made_up + n_prompt
        _, logits, cache = self._prefilled(rows, n_prompt, n_ctx or first + n_tokens + 1)
        if made_up and cache.attention is not None:
            cache = cache.replace(attention=_moved_up(cache.attention, made_up))
        hp = self.params.hparams
        _, state = token_loop.start(
            self.params,
            logits,
            [[1]] * rows,
            list(range(rows)),
            [first] * rows,
            [n_tokens + 1] * rows,
            [[]] * rows,
            make_sampling(rows),
        )
        n_cells = cache.n_cells
        n_kv = None if n_cells is None else context_bucket(first + n_tokens, n_cells)
        self.jax.block_until_ready((state, cache))
        began = time.perf_counter()
        written, cache, state = token_loop.advance(
            self.params, cache, state, n_tokens=n_tokens, n_kv=n_kv, aligned=True
        )
        self.jax.block_until_ready((written, cache))
        seconds = time.perf_counter() - began
        assert int(written.min()) >= 0 and int(written.max()) < hp.vocab_size
        return seconds

    def bytes_per_token(self) -> int:
        """Bytes of K/V that a token takes in all layers."""
        hp = self.params.hparams
        size = self.params.dtype.itemsize
        return sum(
            heads * width * size
            for layer in hp.attention_layer_indices
            for heads, width in hp.cell_shapes(layer)
        )

    def bandwidth(self) -> float:
        """Bytes/s that a product with a matrix too large for any cache reads: the best of 7."""
        jnp = self.jax.numpy
        matrix, vector = jnp.ones((16384, 8192), jnp.float32), jnp.ones(8192, jnp.float32)
        product = self.jax.jit(lambda m, v: m @ v)
        self.jax.block_until_ready(product(matrix, vector))
        seconds = []
        for _ in range(7):
            began = time.perf_counter()
            self.jax.block_until_ready(product(matrix, vector))
            seconds.append(time.perf_counter() - began)
        return matrix.nbytes / min(seconds)


def _moved_up(child: Any, n: int) -> Any:
    """An attention child whose streams hold n random tokens before those that they held."""
    import jax
    import jax.numpy as jnp

    def filled(buffer: Any, key: Any) -> Any:
        old = jnp.roll(buffer, n, axis=2)
        noise = jax.random.normal(key, buffer.shape[:2] + (n, buffer.shape[3]), buffer.dtype)
        return old.at[:, :, :n].set(noise)

    keys = jax.random.split(jax.random.key(0), 2 * len(child.keys))
    positions = jnp.roll(jnp.where(child.positions >= 0, child.positions + n, -1), n, axis=1)
    return child.replace(
        keys=tuple(map(filled, child.keys, keys)),
        values=tuple(map(filled, child.values, keys[len(child.keys) :])),
        positions=positions.at[:, :n].set(jnp.arange(n)),
    )


class Transformers:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(args.threads)
        torch.set_grad_enabled(False)
        self.torch = torch
        dtype = getattr(torch, args.dtype)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype)
        self.model.eval()

    def _prefilled(self, rows: int, n_prompt: int) -> tuple[float, Any]:
        vocab = self.model.config.vocab_size
        prompts = [prompt_tokens(vocab, row, n_prompt) for row in range(rows)]
        tokens = self.torch.tensor(prompts)
        began = time.perf_counter()
        out = self.model(tokens, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - began, out

    def prefill(self, rows: int, n_prompt: int) -> float:
        return self._prefilled(rows, n_prompt)[0]

    def logits(self) -> list[float]:
        return self._prefilled(1, CHECK_PROMPT)[1].logits[0, -1].float().tolist()

    def decode(self, rows: int, n_prompt: int, n_tokens: int) -> float:
        _, out = self._prefilled(rows, n_prompt)
        began = time.perf_counter()
        for _ in range(n_tokens):
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
        return time.perf_counter() - began


class LlamaCpp:
    def __init__(self, args: argparse.Namespace) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(args.gguf).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {args.gguf}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads, self.ubatch = args.threads, args.ubatch

    def _run(
        self, rows: int, n_prompt: int, n_tokens: int, unified: bool = False
    ) -> tuple[float, float, list[float]]:
        lib = self.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * (n_prompt + n_tokens + 1), rows
        params.n_batch, params.n_ubatch = rows * n_prompt, self.ubatch
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = unified
        context = lib.llama_init_from_model(self.model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        batch = lib.llama_batch_init(rows * n_prompt, 0, 1)

        def decode(entries: list[tuple[int, int, int, bool]]) -> None:
            batch.n_tokens = len(entries)
            for i, (token, position, row, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            if lib.llama_decode(context, batch):
                raise RuntimeError("llama.cpp failed to decode")
            lib.llama_synchronize(context)

        try:
            prompt = [
                (token, i, row, i == n_prompt - 1)
                for row in range(rows)
                for i, token in enumerate(prompt_tokens(self.vocab, row, n_prompt))
            ]
            began = time.perf_counter()
            decode(prompt)
            middle = time.perf_counter()
            logits = lib.llama_get_logits_ith(context, n_prompt - 1)[: self.vocab]
            restarted = time.perf_counter()
            for k in range(n_tokens):
                decode([(1 + k % 1000, n_prompt + k, row, True) for row in range(rows)])
            return middle - began, time.perf_counter() - restarted, logits
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def prefill(self, rows: int, n_prompt: int) -> float:
        return self._run(rows, n_prompt, 0)[0]

    def logits(self) -> list[float]:
        return self._run(1, CHECK_PROMPT, 0)[2]

    def decode(self, rows: int, n_prompt: int, n_tokens: int, unified: bool = False) -> float:
        """unified: one K/V buffer for all rows instead of one each."""
        return self._run(rows, n_prompt, n_tokens, unified)[1]


KINDS: dict[str, Any] = {
    "jaxhybrid": JaxHybrid,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}
MODULES = {"jaxhybrid": "jaxhybrid", "transformers": "transformers", "llama.cpp": "llama_cpp"}


def serve(args: argparse.Namespace) -> None:
    """The process of one engine: a JSON request [method, keywords] a line in, a JSON answer a line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not end up among the answers
    if hasattr(os, "sched_setaffinity"):  # before XLA counts the cores; it has no setting for it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    try:
        engine: Any = KINDS[args.engine](args)
        print(json.dumps({"value": "ready"}), file=answers, flush=True)
        for line in sys.stdin:
            method, keywords = json.loads(line)
            print(json.dumps({"value": getattr(engine, method)(**keywords)}), file=answers, flush=True)
    except Exception as error:
        print(json.dumps({"error": " ".join(str(error).split())[:300]}), file=answers, flush=True)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmark_engines")
    parser.add_argument("engine", choices=list(KINDS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ubatch", type=int, default=512)
    serve(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())

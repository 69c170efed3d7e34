"""What the benchmark measures of each engine: seconds of a prefill and of decoding after one."""

from __future__ import annotations

import argparse
import time
from typing import Any, Protocol


class Engine(Protocol):
    """Both return seconds; `decode` those of the tokens after a prefix of `n_prompt`."""

    def prefill(self, rows: int, n_prompt: int) -> float: ...
    def decode(self, rows: int, n_prompt: int, n_tokens: int) -> float: ...


def prompt_tokens(vocab: int, row: int, n: int) -> list[int]:
    return [(1 + 7919 * (i + 1) * (row + 3)) % vocab for i in range(n)]


class JaxHybrid:
    def __init__(self, args: argparse.Namespace) -> None:
        import jax

        import jaxhybrid

        self.jax, self.jh, self.ubatch = jax, jaxhybrid, args.ubatch
        self.params = jaxhybrid.load_params(args.folder, args.dtype)

    def _prefilled(self, rows: int, n_prompt: int, room: int) -> tuple[float, Any, Any]:
        hp = self.params.hparams
        cache = self.jh.create_cache(hp, n_prompt + room, rows, dtype=self.params.dtype)
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
        return self._prefilled(rows, n_prompt, 1)[0]

    def decode(self, rows: int, n_prompt: int, n_tokens: int) -> float:
        from jaxhybrid import token_loop
        from jaxhybrid.driver import context_bucket
        from jaxhybrid.sampling import make_sampling

        _, logits, cache = self._prefilled(rows, n_prompt, n_tokens + 1)
        hp = self.params.hparams
        _, state = token_loop.start(
            self.params,
            logits,
            [[1]] * rows,
            list(range(rows)),
            [n_prompt] * rows,
            [n_tokens + 1] * rows,
            [[]] * rows,
            make_sampling(rows),
        )
        n_cells = cache.n_cells
        n_kv = None if n_cells is None else context_bucket(n_prompt + n_tokens, n_cells)
        self.jax.block_until_ready((state, cache))
        began = time.perf_counter()
        written, cache, state = token_loop.advance(
            self.params, cache, state, n_tokens=n_tokens, n_kv=n_kv, aligned=True
        )
        self.jax.block_until_ready((written, cache))
        assert int(written.min()) >= 0 and int(written.max()) < hp.vocab_size
        return time.perf_counter() - began


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
            raise SystemExit(f"benchmark: llama.cpp cannot load {args.gguf}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.threads, self.ubatch = args.threads, args.ubatch

    def _run(self, rows: int, n_prompt: int, n_tokens: int) -> tuple[float, float]:
        lib = self.lib
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * (n_prompt + n_tokens + 1), rows
        params.n_batch, params.n_ubatch = rows * n_prompt, self.ubatch
        params.n_threads = params.n_threads_batch = self.threads
        context = lib.llama_init_from_model(self.model, params)
        batch = lib.llama_batch_init(rows * n_prompt, 0, 1)

        def decode(entries: list[tuple[int, int, int, bool]]) -> None:
            batch.n_tokens = len(entries)
            for i, (token, position, row, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            if lib.llama_decode(context, batch):
                raise SystemExit("benchmark: llama.cpp failed to decode")

        try:
            prompt = [
                (token, i, row, i == n_prompt - 1)
                for row in range(rows)
                for i, token in enumerate(prompt_tokens(self.vocab, row, n_prompt))
            ]
            began = time.perf_counter()
            decode(prompt)
            lib.llama_synchronize(context)
            middle = time.perf_counter()
            for k in range(n_tokens):
                decode([(1 + k % 1000, n_prompt + k, row, True) for row in range(rows)])
                lib.llama_synchronize(context)
            return middle - began, time.perf_counter() - middle
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def prefill(self, rows: int, n_prompt: int) -> float:
        return self._run(rows, n_prompt, 0)[0]

    def decode(self, rows: int, n_prompt: int, n_tokens: int) -> float:
        return self._run(rows, n_prompt, n_tokens)[1]


KINDS: dict[str, Any] = {
    "jaxhybrid": JaxHybrid,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}

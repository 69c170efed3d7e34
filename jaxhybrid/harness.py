# pyright: reportMissingImports=false
# lm-eval is an extra
"""The model class for lm-evaluation-harness (the package lm-eval); importing it registers it there.

    lm_eval.simple_evaluate(model=JaxHybridLM("FOLDER_OR_HUB_ID"), tasks=["hellaswag"])

The interface is that of lm_eval.api.model.TemplateLM, and results are those of its Hugging Face model up to
float32 rounding: windows, truncation, and where BOS is put, follow it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxhybrid.engine import generate
from jaxhybrid.errors import TokenizerError, UsageError
from jaxhybrid.params import flatten
from jaxhybrid.report import load_model
from jaxhybrid.scoring import score
from jaxhybrid.settings import Model

DEFAULT_LENGTH = 2048  # of models that have no limit, as in lm-eval
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
NO_EFFECT = {"do_sample", "num_beams", "use_cache", "num_return_sequences"}  # at the values checked below


@register_model("jaxhybrid")
class JaxHybridLM(TemplateLM):
    """A model of this package in lm-eval.

    pretrained: a folder or hub id (None: the model inside the package), or a `Model`. dtype, quantize: of the
    weights, as in the commands. adapter: a folder of PEFT's. max_length: most tokens of a request (None: the
    model's context, else 2,048).
    max_gen_toks: what a task writes that does not say. batch_size: sequences side by side ("auto": 16).
    add_bos_token: whether a text begins with BOS (None: as its tokenizer has it). think_end_token: a text up
    to which generated text is reasoning, which is cut off.
    """

    def __init__(
        self,
        pretrained: str | Model | None = None,
        *,
        dtype: str = "auto",
        quantize: str | None = None,
        adapter: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = "auto",
        ubatch: int = 512,
        add_bos_token: bool | None = None,
        think_end_token: str | None = None,
        max_batch_size: int | None = None,  # given by lm-eval, for its search of a batch size
        device: str | None = None,  # given by lm-eval; jax chooses it (JAX_PLATFORMS)
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, Model):
            pretrained = load_model(pretrained, dtype, max_length, quantize, adapter)
        self.model = pretrained
        self.max_gen_toks = int(max_gen_toks)
        self.batch_size = 16 if str(batch_size).startswith("auto") else int(batch_size)
        self.n_ubatch = int(ubatch)
        self.add_bos_token, self.think_end_token = add_bos_token, think_end_token
        self.max_length = int(max_length or self.model.params.hparams.context_length or DEFAULT_LENGTH)

    # ---------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int:
        tokenizer = self.model.tokenizer
        found = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", ""))
        return found if found is not None else min(tokenizer.eos_ids, default=self.prefix_token_id)

    @property
    def prefix_token_id(self) -> int:
        found = self.model.tokenizer.prefix_id
        if found is None:
            raise UsageError(f"{self.model.folder}: has neither BOS nor EOS to stand for an empty context")
        return found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; BOS as the tokenizer or `add_bos_token` says, but not before one that is there."""
        tokenizer = self.model.tokenizer
        if add_special_tokens is None:
            bos = tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            asked = True if self.add_bos_token is None else self.add_bos_token
            add_special_tokens = asked and not string.startswith(bos)
        return tokenizer.encode(string, add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        return str(self.model.folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The jinja source of a template by its name (True: the default one)."""
        if not chat_template:
            return None
        sources = self.model.tokenizer.chat_templates
        name = "default" if chat_template is True else str(chat_template)
        if name not in sources:
            there = ", ".join(sorted(sources)) or "none"
            raise UsageError(f"chat_template: {self.model.folder} has no template {name!r}, only {there}")
        return sources[name]

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation; without the generation prompt it ends with the last message's text.

        A template that refuses system messages gets the others, as in lm-eval's own models.
        """
        tokenizer = self.model.tokenizer
        try:
            text = tokenizer.apply_chat_template(chat_history, add_generation_prompt)
        except TokenizerError as error:
            rest = [message for message in chat_history if message.get("role") != "system"]
            if len(rest) == len(chat_history):
                raise
            warnings.warn(f"{error}; the system message is left out", stacklevel=2)
            text = tokenizer.apply_chat_template(rest, add_generation_prompt)
        last = str(chat_history[-1].get("content", "")).strip() if chat_history else ""
        if not add_generation_prompt and last and last in text:
            text = text[: text.rindex(last) + len(last)]
        return text

    # ---------------------------------------------------------------------------------- requests

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood requests") as bar:

            def progress(done: int, total: int) -> None:
                bar.update(done - bar.n)

            scores = score(
                self.model,
                [(context, continuation) for _, context, continuation in requests],
                max_length=self.max_length,
                batch_size=self.batch_size,
                n_ubatch=self.n_ubatch,
                progress=progress,
            )
        found = [(s.logprob, s.greedy) for s in scores]
        for (texts, *_), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        counts: list[int] = []
        for request in requests:
            rolling = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            before = len(windows)
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            counts.append(len(windows) - before)
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, requests with the same settings side by side."""
        asked: list[Any] = [request.args for request in requests]  # (prompt, generation_kwargs)
        groups: dict[str, list[int]] = {}
        for i, (_, kwargs) in enumerate(asked):
            groups.setdefault(repr(kwargs), []).append(i)
        found: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until requests") as bar:
            for members in groups.values():
                kwargs = normalize_gen_kwargs(asked[members[0]][1], self.max_gen_toks)
                max_tokens, settings = self._settings(dict(kwargs))
                room = self.max_length - max_tokens
                if room < 1:
                    raise UsageError(
                        f"max_gen_toks: {max_tokens} leaves no room in max_length, {self.max_length}"
                    )
                prompts = {i: self.tok_encode(asked[i][0])[-room:] for i in members}
                cells = max(map(len, prompts.values())) + max_tokens  # one size for all batches
                members.sort(key=lambda i: len(prompts[i]))
                for k in range(0, len(members), self.batch_size):
                    batch = members[k : k + self.batch_size]
                    texts = generate(self.model, [prompts[i] for i in batch], n_ctx=cells, **settings)
                    for i, result in zip(batch, texts, strict=True):
                        found[i] = postprocess_generated_text(
                            result.text, list(settings["stop"]), self.think_end_token
                        )
                        self.cache_hook.add_partial("generate_until", asked[i], found[i])
                    bar.update(len(batch))
        return [found[i] for i in range(len(requests))]

    def _settings(self, kwargs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """(tokens to write, fields of `Settings`) of generation_kwargs that lm-eval has normalized."""
        stop = [text for text in handle_stop_sequences(kwargs.pop("until", None), eos=None) if text]
        max_tokens = int(kwargs.pop("max_gen_toks"))
        settings = {name: kwargs.pop(name) for name in SAMPLING if kwargs.get(name) is not None}
        if not kwargs.get("do_sample"):
            settings["temperature"] = 0.0
        unknown = sorted(kwargs.keys() - NO_EFFECT - set(SAMPLING))
        if unknown or kwargs.get("num_beams", 1) != 1 or kwargs.get("num_return_sequences", 1) != 1:
            name = unknown[0] if unknown else "num_beams or num_return_sequences above 1"
            raise UsageError(
                f"gen_kwargs: {name} is not supported; there are until, max_gen_toks, {SAMPLING}"
            )
        # reasoning is cut off before stop strings are looked for
        during = () if self.think_end_token else tuple(stop)
        settings |= {"max_tokens": max_tokens, "n_ubatch": self.n_ubatch, "batch_size": self.batch_size}
        return max_tokens, settings | {"stop": during}

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        params = self.model.params
        n_params = sum(leaf.size for leaf in flatten(params.tensors).values())
        return {"model_num_parameters": n_params, "model_dtype": str(params.dtype)}

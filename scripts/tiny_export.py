"""What makes the exported model a folder that others can read: tokenizer settings, chat template, card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import tiny_text
from tokenizers import Tokenizer

from jaxhybrid.engine import generate, load
from jaxhybrid.files.config import write_json

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
<|user|>{{ message.content }}
{%- elif message.role == 'assistant' -%}
<|assistant|>{{ message.content }}<|endoftext|>
{%- else -%}
{{ raise_exception('only the roles user and assistant are known, not ' ~ message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """tokenizer.json and the files that say which tokens end a text and how a conversation is written."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {name: tiny_text.END for name in ("bos_token", "eos_token", "pad_token")}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_length}
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


SAMPLE_PROMPTS = ("In the beginning", "And Moses said unto the people,")
BIBLE_SOURCE = """\
The text is the King James Version of the Bible (1611), as the Debian package `bible-kjv-text` carries it; its
copyright has expired ("The copyright for the King James Version text of the Bible is expired", says the
package's copyright file; in the United Kingdom printing it is a right of the Crown). The weights are released
under the licence of jaxhybrid, Apache-2.0."""


def samples(model: Path) -> str:
    """What the exported model writes after two prompts."""
    loaded = load(model, dtype=jnp.float32)
    results = generate(loaded, SAMPLE_PROMPTS, max_tokens=80, temperature=0.7, seed=1)
    pairs = zip(SAMPLE_PROMPTS, results, strict=True)
    return "\n\n".join(f"> **{prompt}**{result.text.rstrip()}" for prompt, result in pairs)


def model_card(report: dict[str, Any], samples: str) -> str:
    """README.md of the exported folder, from the run's report."""
    bits = report["held-out bits per byte"]
    trained, held_out = report["documents trained on and held out"]
    source = BIBLE_SOURCE if report["text"] == "bible" else f"The text is {Path(report['text']).name}."
    return f"""\
# A tiny hybrid model

{report["parameters"]:,} parameters in bfloat16, `granitemoehybrid` layout: Mamba-2 layers with attention
between them, a byte-level BPE tokenizer of {report["vocab"]:,} tokens. It exists to try a program, not to
inform anyone.

{source}

Made by `scripts/train_tiny.py`: {report["steps done"]:,} steps of {report["batch"]} x {report["length"]}
tokens (seed {report["seed"]}), {trained:,} documents, some of them a second time as a conversation in which
the user says a sentence and the assistant the next one.

Held out: {held_out} documents, {report["held-out bytes"]:,} bytes, at **{bits:.3f} bits per byte**
(windows of {report["evaluation length"]} tokens that each start afresh; the weights as stored, computed in
float32).

Samples at temperature 0.7, with what follows the bold prompt written by the model:

{samples}
"""

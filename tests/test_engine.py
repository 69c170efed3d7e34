"""Generating through Python: results, stops, seeds, neighbours, conversations."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import conversation, generation
from jaxhybrid.conversation import Conversation
from jaxhybrid.errors import UsageError
from jaxhybrid.model import forward
from jaxhybrid.settings import Settings, Timings

PROMPT = "hello"
WANTED = {"max_tokens": 12, "n_ctx": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return jh.load(tiny.write_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def greedy(model):
    return jh.generate(model, PROMPT, **WANTED)


def test_greedy_is_the_argmax_of_the_whole_text(model, greedy):
    ids = model.tokenizer.encode(PROMPT)
    whole = jnp.asarray([ids + greedy.tokens])
    chosen = np.asarray(jnp.argmax(forward(model.params, whole)[0], axis=-1))
    assert greedy.tokens == chosen[len(ids) - 1 : -1].tolist()
    assert greedy.finish_reason == "length" and greedy.prompt_tokens == 5
    assert greedy.text == model.tokenizer.decode(greedy.tokens)


def test_one_prompt_gives_a_result_and_a_list_gives_a_list(model, greedy):
    several = jh.generate(model, [PROMPT, "other", PROMPT], **WANTED)
    assert [r.index for r in several] == [0, 1, 2]
    assert several[0].tokens == several[2].tokens == greedy.tokens
    by_ids = jh.generate(model, model.tokenizer.encode(PROMPT), **WANTED)
    assert by_ids.tokens == greedy.tokens
    assert jh.generate(model, [], **WANTED) == []


def test_a_text_does_not_depend_on_its_neighbours_or_their_number(model):
    sampled = {"temperature": 1.0, "seed": 11, **WANTED}
    together = jh.generate(model, ["one", "three", "two"], **sampled)
    in_batches = jh.generate(model, ["one", "three", "two"], batch_size=2, **sampled)
    alone = jh.generate(model, "three", **(sampled | {"seed": 12}))
    assert [r.tokens for r in together] == [r.tokens for r in in_batches]
    assert together[1].tokens == alone.tokens
    assert together[0].tokens != together[2].tokens


@pytest.mark.parametrize("dispatch", [1, 5, 64])
def test_the_number_of_tokens_a_dispatch_changes_nothing(model, greedy, dispatch):
    assert jh.generate(model, PROMPT, dispatch=dispatch, **WANTED).tokens == greedy.tokens


def test_stop_tokens_and_strings_end_a_text(model, greedy):
    k = 5
    stop = greedy.tokens[k]
    first = greedy.tokens.index(stop)
    by_token = jh.generate(model, PROMPT, stop_tokens=(stop,), **WANTED)
    assert by_token.tokens == greedy.tokens[: first + 1] and by_token.finish_reason == "stop"
    assert by_token.text == model.tokenizer.decode(greedy.tokens[:first])
    string = model.tokenizer.decode(greedy.tokens)[2:5]
    by_string = jh.generate(model, PROMPT, stop=(string,), **WANTED)
    assert by_string.finish_reason == "stop"
    assert by_string.text == greedy.text[: greedy.text.find(string)]


def test_the_end_of_text_token_stops_unless_ignored(tmp_path, greedy):
    folder = tiny.write_folder(tmp_path)
    eos = greedy.tokens[3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    ended = jh.generate(jh.load(folder), PROMPT, **WANTED)
    assert ended.tokens == greedy.tokens[: greedy.tokens.index(eos) + 1]
    assert ended.finish_reason == "stop"
    ignored = jh.generate(jh.load(folder), PROMPT, ignore_eos=True, **WANTED)
    assert ignored.tokens == greedy.tokens


def test_a_special_token_as_stop_string_stops_as_a_token(model):
    session = generation.Generation(
        model, None, [[1]], [1], 0, Settings(stop=("<|user|>", "text")), Timings()
    )  # type: ignore[arg-type]
    assert model.tokenizer.token_id("<|user|>") in session.stop_ids


def test_the_context_limits_a_text(model, greedy):
    full = jh.generate(model, PROMPT, max_tokens=12, n_ctx=8)
    assert full.finish_reason == "length"
    assert full.tokens == greedy.tokens[:4]  # the last one never enters the 8 cells


def test_weights_that_are_not_finite_end_a_text(model):
    tensors = jax.tree.map(lambda leaf: leaf, model.params.tensors)
    tensors["norm"]["weight"] = tensors["norm"]["weight"].at[0].set(jnp.nan)
    broken = dataclasses.replace(model, params=model.params.replace(tensors=tensors))
    result = jh.generate(broken, PROMPT, **WANTED)
    assert result.finish_reason == "not_finite" and result.tokens == []


def test_pieces_add_up_and_a_stream_can_be_left(model, greedy):
    pieces = list(jh.stream(model, [PROMPT], **WANTED))
    assert "".join(p.text for p in pieces) == greedy.text
    assert [t for p in pieces for t in p.tokens] == greedy.tokens
    assert [p.result is None for p in pieces] == [True] * (len(pieces) - 1) + [False]
    left = jh.stream(model, [PROMPT], **WANTED)
    assert next(left).tokens == tuple(greedy.tokens[:1])
    left.close()


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("", {}, "prompt 1 is empty"),
        (["a", ""], {}, "prompt 2 is empty"),
        ([[5, 400]], {}, "token 400"),
        ([[-1]], {}, "token -1"),
        ("hello", {"n_ctx": 4}, "5 tokens, the context holds 4"),
        ("a", {"max_tokens": 0}, "max_tokens"),
        ("a", {"n_ctx": 0}, "n_ctx"),
        ("a", {"batch_size": 0}, "batch_size"),
        ("a", {"top_p": 2.0}, "top_p"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"stop": ("",)}, "stop string is empty"),
    ],
)
def test_wrong_use_is_named(model, prompts, settings, message):
    with pytest.raises(UsageError, match=message) as caught:
        jh.generate(model, prompts, **settings)
    assert "\n" not in str(caught.value)


def test_a_prompt_beyond_the_training_length_warns(model):
    with pytest.warns(UserWarning, match="513 tokens is longer than the 512"):
        jh.stream(model, [[5] * 513], max_tokens=1)


# ----------------------------------------------------------------------------------- conversations


@pytest.fixture
def talk(model):
    return Conversation(model, {"max_tokens": 6, "n_ctx": 128}, None)


def test_a_turn_computes_only_what_is_new(model, talk):
    first = talk.say("hi", lambda text: None)
    assert talk.computed == first.prompt_tokens
    held = len(talk.held)
    second = talk.say("more", lambda text: None)
    fresh = Conversation(model, {"max_tokens": 6, "n_ctx": 128}, None)
    fresh.messages = list(talk.messages[:2])
    again = fresh.say("more", lambda text: None)
    assert again.text == second.text and fresh.computed == second.prompt_tokens
    # at least the first message is part of the next prompt (without the mark after it, which is one token
    # here); the reply is if its text has the same tokens
    assert second.prompt_tokens - held <= talk.computed <= second.prompt_tokens - (first.prompt_tokens - 1)


def test_a_cache_that_continues_the_prompt_is_used(model, talk, monkeypatch):
    computed = []
    prefill = conversation.prefill
    monkeypatch.setattr(
        conversation, "prefill", lambda m, c, g, s: computed.append(len(g[0])) or prefill(m, c, g, s)
    )
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    result = talk.say("hi", lambda text: None)
    # a template that renders replies token for token, whatever bytes they are
    monkeypatch.setattr(
        type(model.tokenizer),
        "encode_chat",
        lambda self, messages, **_: prompt + result.tokens + [1, 100, 2],
    )
    second = talk.say("next", lambda text: None)
    assert second.prompt_tokens == len(prompt) + len(result.tokens) + 3
    # the first prompt goes in two pieces, so that there is a snapshot before the mark that asks for a reply
    pieces = [len(prompt) - 1, 1]
    assert computed == [*pieces, second.prompt_tokens - (len(prompt) + len(result.tokens) - 1)]
    fresh = jh.generate(model, prompt + result.tokens + [1, 100, 2], max_tokens=6, n_ctx=128)
    assert second.tokens == fresh.tokens


def test_an_interrupted_reply_is_kept(talk):
    def interrupt(text):
        raise KeyboardInterrupt

    result = talk.say("hi", interrupt)
    assert result.finish_reason == "interrupted"
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert talk.say("again", lambda text: None).finish_reason == "length"


def test_a_conversation_that_outgrows_its_context_is_refused(talk):
    with pytest.raises(UsageError, match="the context holds 128"):
        talk.say("x" * 200, lambda text: None)
    assert talk.messages == []

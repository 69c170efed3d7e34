"""Conversations that go back, are kept on disk, outgrow their context, or are written with a drafter."""

import importlib
import io
import json
import os
import sys
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import conversation as module
from jaxhybrid import terminal
from jaxhybrid.conversation import Conversation
from jaxhybrid.errors import CacheFullError, CheckpointError, TokenizerError, UsageError
from jaxhybrid.session import load_session, save_session
from jaxhybrid.terminal import converse

command = importlib.import_module("jaxhybrid.generate")
SETTINGS = {"max_tokens": 6, "n_ctx": 128}
ATTENTION = {"layer_types": ["attention", "attention"], "position_embedding_type": "rope"}


def silent(text):
    pass


@pytest.fixture(scope="module")
def attention_model(tmp_path_factory):
    return jh.load(tiny.write_folder(tmp_path_factory.mktemp("attention"), tiny.CONFIG | ATTENTION))


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each prefill ran through the model."""
    counts, prefill = [], module.prefill
    monkeypatch.setattr(module, "prefill", lambda m, c, g, s: counts.append(len(g[0])) or prefill(m, c, g, s))
    return counts


def fresh(model, tokens):
    """Greedy continuation without any cache from before."""
    return jh.generate(model, tokens, **SETTINGS).tokens


# ------------------------------------------------------------------------------------- going back


def test_editing_the_last_turn_computes_only_the_edit(model, computed):
    talk = Conversation(model, SETTINGS, chat=False)
    first = talk.say("a long beginning, ", silent)
    before = list(talk.tokens)
    talk.say("then this", silent)
    edited = talk.edit("then that!", silent)
    # what the snapshot before the turn holds is all but the newest token of the first reply
    assert computed == [18, 10, 11]
    assert edited.tokens == fresh(model, before + model.tokenizer.encode("then that!"))
    assert talk.tokens[: len(before)] == before and first.tokens == before[18:]
    again = talk.edit("then that!", silent)
    assert again.tokens == edited.tokens and computed[-1] == 11
    talk.undo()
    assert talk.tokens == before
    talk.undo()
    with pytest.raises(UsageError, match="no turn to take back"):
        talk.undo()


def test_editing_an_attention_model_goes_back_to_the_very_token(attention_model, computed):
    talk = Conversation(attention_model, SETTINGS, chat=False)
    talk.say("abcdefgh", silent)
    edited = talk.edit("abcdeXYZ", silent)
    assert computed == [8, 3]
    assert edited.tokens == fresh(attention_model, attention_model.tokenizer.encode("abcdeXYZ"))


def test_an_edit_that_is_refused_or_interrupted_keeps_the_turn(model, monkeypatch):
    talk = Conversation(model, SETTINGS, chat=False)
    talk.say("hello", silent)
    kept = (list(talk.tokens), list(talk.turns))
    with pytest.raises(UsageError, match="the context holds 128"):
        talk.edit("x" * 200, silent)
    assert (talk.tokens, talk.turns) == kept
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "prefill", Mock(side_effect=KeyboardInterrupt))
        talk.edit("other", silent)
    assert (talk.tokens, talk.turns) == kept
    assert talk.say(" again", silent).tokens == fresh(model, kept[0] + model.tokenizer.encode(" again"))


def test_snapshots_are_few(model, monkeypatch):
    monkeypatch.setattr(module, "MAX_SNAPSHOTS", 4)
    talk = Conversation(model, SETTINGS | {"max_tokens": 2}, chat=False)
    for _ in range(5):
        talk.say("ab", silent)
    assert len(talk.snapshots) == 4 and max(talk.snapshots) == len(talk.tokens) - 2


# as the templates of reasoning models do: what a reply begins with is left out once there is another message
STRIPPING = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' and not loop.last -%}{{ message.content[3:] }}
{%- else -%}{{ message.content }}{%- endif -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>think:{%- endif -%}
"""


@pytest.mark.parametrize("which", ["hybrid", "attention"])
def test_old_reasoning_that_a_template_leaves_out(which, computed, tmp_path):
    """Each turn goes back to the end of the message before the reply that changed, and no further."""
    folder = tiny.write_folder(tmp_path, tiny.CONFIG | (ATTENTION if which == "attention" else {}))
    (folder / "chat_template.jinja").write_text(STRIPPING)
    chosen = jh.load(folder)
    talk = Conversation(chosen, SETTINGS)
    for n, text in enumerate(["hello", "and again", "once more"]):
        talk.say(text, silent)
        assert talk.computed == sum(computed)
        said = [*talk.messages[:-1]]
        prompt = chosen.tokenizer.encode_chat(said)
        assert talk.tokens[: len(prompt)] == prompt
        assert talk.tokens[len(prompt) :] == fresh(chosen, prompt)
        if n:
            end_of_message = len(chosen.tokenizer.encode_chat(said[:-2], add_generation_prompt=False))
            known = end_of_message + (1 if which == "attention" else 0)  # <|assistant|> is in both
            assert sum(computed) == len(prompt) - known
        del computed[:]


def test_ctrl_c_keeps_what_was_computed(model, computed):
    pieces = []

    def impatient(text):
        pieces.append(text)
        if len(pieces) == 2:  # the cache holds more than was shown
            raise KeyboardInterrupt

    talk = Conversation(model, SETTINGS | {"max_tokens": 24, "ignore_eos": True})
    talk.say("a first message of some length", silent)
    result = talk.say("and this", impatient)
    assert result.finish_reason == "interrupted" and talk.messages[-1]["content"] == result.text
    assert talk.cache is not None and len(talk.held) > 50
    del computed[:]
    reply = talk.say("more", silent)
    assert sum(computed) < 40  # the reply and the new message, not what came before
    assert reply.tokens[:6] == fresh(model, talk.tokens[: reply.prompt_tokens])


def test_a_stop_string_costs_no_more_than_the_reply(model, computed):
    reply = Conversation(model, SETTINGS | {"ignore_eos": True}).say("a message of some length", silent)
    stop = next(c for c in reply.text if c.isprintable() and c != "\ufffd")
    talk = Conversation(model, SETTINGS | {"stop": (stop,), "ignore_eos": True})
    talk.say("a message of some length", silent)
    assert talk.held and talk.cache is not None
    del computed[:]
    talk.say("more", silent)
    assert sum(computed) <= 6 + 8


def test_copies_go_their_own_ways(model, computed):
    talk = Conversation(model, SETTINGS)
    talk.say("a first message of more than forty characters", silent)
    other = talk.fork()
    del computed[:]
    there, here = other.say("one", silent), talk.say("two", silent)
    assert sum(computed) < 40  # neither computes what both had
    for branch, result, text in ((other, there, "one"), (talk, here, "two")):
        prompt = model.tokenizer.encode_chat(branch.messages[:-1])
        assert branch.messages[-2]["content"] == text and result.tokens == fresh(model, prompt)


def test_a_template_that_is_missing_or_refuses(tmp_path, model):
    folder = tiny.write_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(TokenizerError, match="has no chat template: give a plain prompt"):
        Conversation(jh.load(folder), SETTINGS)
    refusing = "{% if not add_generation_prompt %}{{ raise_exception('end with a message') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusing + tiny.CHAT_TEMPLATE)
    talk = Conversation(jh.load(folder), SETTINGS)
    talk.say("hello", silent)  # where the message ends is found when it can be
    again = talk.say("again", silent).tokens
    assert again == fresh(model, model.tokenizer.encode_chat(talk.messages[:3]))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no\nmessages') }}")
    with pytest.raises(TokenizerError, match="refuses these messages: no messages"):
        Conversation(jh.load(folder), SETTINGS)
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refusing + tiny.CHAT_TEMPLATE)
    with pytest.raises(TokenizerError, match="no system"):  # not only when something is said
        Conversation(jh.load(folder), SETTINGS, "be brief")


@pytest.fixture
def type_lines(monkeypatch, capsys):
    """Has a conversation with these lines: (exit code, standard output, lines of standard error)."""

    def type_lines(talk, *lines, quiet=True, save_to=None):
        waiting = iter(lines)

        def typed(prompt=""):
            try:
                line = next(waiting)
            except StopIteration:
                raise EOFError from None
            if line is KeyboardInterrupt:
                raise line
            return line

        monkeypatch.setattr("builtins.input", typed)
        code = converse(talk, quiet, save_to)
        out, err = capsys.readouterr()
        return code, out, [line.removeprefix("> ") for line in err.splitlines()]

    return type_lines


def test_commands_on_the_terminal(model, type_lines):
    talk = Conversation(model, SETTINGS)
    lines = [
        "hi",
        "/edit ho",
        "/undo",
        "/undo",
        "/edit",
        "/exit",
        "/",
        KeyboardInterrupt,
        " /undo",
        "/quit",
        "x",
    ]
    code, out, err = type_lines(talk, *lines)
    assert code == 0
    assert [m["content"] for m in talk.messages[::2]] == ["/", " /undo"]  # these were said
    told = [line.replace("> ", "") for line in err]
    assert "* main: 0 turns" in told[0]
    assert told[1:4] == [
        "error: there is no turn to take back",
        "error: there is no message to edit",
        "error: /exit: no such command, /help lists them; begin with a space to say it",
    ]


def test_branches_saving_and_loading_on_the_terminal(model, type_lines, tmp_path):
    talk = Conversation(model, SETTINGS)
    kept = tmp_path / "with space"
    lines = ["hello", "/fork b", "in b", "/switch main", "in main", f"/save {kept}", "/undo", "/undo"]
    lines += [
        f"/load {kept}",
        "/switch",
        "/switch nowhere",
        "/fork b",
        "/fork",
        "/load",
        "/load nowhere",
        "/help",
    ]
    code, out, err = type_lines(talk, *lines)
    told = [told for line in err if (told := line.replace("b> ", "").replace("> ", ""))]
    assert code == 0 and "b: 1 turns" in told[0] and "main: 1 turns" in told[1]
    assert told[2] == f"saved to {kept}"
    assert "main: 1 turns" in told[3] and "main: 0 turns" in told[4]
    assert "main: 2 turns" in told[5] and told[5].endswith("the last: 'in main'")
    assert told[6].startswith("* main: 2 turns") and told[7].startswith("  b: 2 turns")
    for line, words in zip(
        told[8:13],
        ["there are main, b", "one of this name", "a name", "give a folder", "no saved"],
        strict=True,
    ):
        assert line.startswith("error: /") or line.startswith("error: nowhere")
        assert words in line
    assert [line.split()[0] for line in told[13:]] == [h.split()[0] for h in terminal.HELP]
    assert load_session(kept, model, SETTINGS).messages[2]["content"] == "in main"
    larger = Conversation(model, SETTINGS | {"n_ctx": 256})
    _, _, err = type_lines(larger, f"/load {kept}", f"/save {kept}")  # --ctx of the command holds
    assert load_session(kept, model, SETTINGS | {"n_ctx": None}).n_ctx == 256
    type_lines(Conversation(model, SETTINGS | {"n_ctx": 1}), f"/load {kept}", f"/save {kept}")
    assert load_session(kept, model, SETTINGS | {"n_ctx": None}).n_ctx == 256  # what it needs


def test_nothing_but_a_kept_session_is_replaced(model, type_lines, tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").write_text("precious")
    talk = Conversation(model, SETTINGS)
    _, _, err = type_lines(talk, "hi", f"/save {tmp_path / 'mine'}", f"/save {tmp_path / 'folder'}")
    assert (tmp_path / "mine").read_text() == (tmp_path / "folder" / "notes").read_text() == "precious"
    assert "error: " in err[0]


def test_colours_are_for_terminals(monkeypatch, capsys):
    for environment, coloured in (({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        terminal.note("error: [red]x[/red] :smile:", "red")
        shown = capsys.readouterr().err
        assert ("\033[31m" in shown) is coloured and "[red]x[/red] :smile:" in shown
    monkeypatch.undo()
    terminal.note("a" * 500, "dim")
    assert capsys.readouterr().err == "a" * 500 + "\n"


# ---------------------------------------------------------------------------------------- on disk


@pytest.mark.parametrize("which", ["hybrid", "attention"])
def test_a_kept_session_goes_on_and_back_as_if_it_had_never_ended(
    which, model, attention_model, computed, tmp_path
):
    chosen = model if which == "hybrid" else attention_model
    talk = Conversation(chosen, SETTINGS, chat=False)
    talk.say("once upon", silent)
    talk.say(" a time", silent)
    save_session(tmp_path / "s", talk)
    back = load_session(tmp_path / "s", chosen, SETTINGS)
    assert (back.tokens, back.turns, back.held) == (talk.tokens, talk.turns, talk.held)
    assert back.snapshots.keys() == talk.snapshots.keys()
    del computed[:]
    edited = back.edit(" a frog", silent)
    assert computed == [8 if which == "hybrid" else 4]  # " a frog" and a token before, or "frog"
    expected = chosen.tokenizer.encode("once upon") + talk.tokens[9:15] + chosen.tokenizer.encode(" a frog")
    assert edited.tokens == fresh(chosen, expected)
    larger = load_session(tmp_path / "s", chosen, SETTINGS | {"n_ctx": 256})
    assert larger.say("!", silent).tokens == talk.say("!", silent).tokens
    smaller = load_session(tmp_path / "s", chosen, SETTINGS | {"n_ctx": 28})
    with pytest.raises(UsageError, match="the context holds 28"):
        smaller.say("!", silent)
    with pytest.raises(CacheFullError, match="the session holds 27 tokens, the context 24; raise --ctx"):
        load_session(tmp_path / "s", chosen, SETTINGS | {"n_ctx": 24})


def test_a_session_of_another_model_or_none_is_refused(model, attention_model, tmp_path):
    talk = Conversation(model, SETTINGS)
    save_session(tmp_path / "s", talk)
    assert load_session(tmp_path / "s", model, SETTINGS).messages == []
    with pytest.raises(CheckpointError, match="hparams.attention"):
        load_session(tmp_path / "s", attention_model, SETTINGS)
    with pytest.raises(CheckpointError, match="no saved session here"):
        load_session(tmp_path / "t", model, SETTINGS)


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(
        "JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))

    def run(*arguments):
        try:
            code = command.main([str(a) for a in arguments])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("chat", [[], ["--chat"]], ids=["text", "chat"])
def test_sessions_on_the_command_line(run, folder, tmp_path, chat):
    say = ["--model", folder, "--max-tokens", 5, "--json", *chat]
    two = ["--prompt", "hello there", "--prompt"]
    two = ["--prompt", "hello there", "--prompt"]
    code, out, err = run(*say, *two, " you", "--save-session", tmp_path / "s")
    assert code == 0 and err.count("\n") == 2
    first, second = map(json.loads, out.splitlines())
    assert (first["index"], second["index"]) == (0, 1) and second["prompt_tokens"] > first["prompt_tokens"]
    more = [*say, "--load-session", tmp_path / "s", "--prompt", " me"]
    code, out, err = run(*more, "--edit-last", "--save-session", tmp_path / "t")
    assert code == 0
    edited = json.loads(out)
    # a snapshot leads back to the turn before: only its own text is computed
    new = 3 if not chat else 5  # with the marks of the template
    read = int(err.split("prompt ")[1].split(" tokens")[0])
    # and, where the reply's bytes are no text that encodes to them again, the reply and the mark before it
    assert new <= read <= new + 7
    fresh = json.loads(run(*say, *two, " me", "--save-session", tmp_path / "u")[1].splitlines()[1])
    assert edited["tokens"] == fresh["tokens"]
    assert run(*more)[0] == 0  # the session that was loaded is as it was
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["00000002"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--edit-last"], "--edit-last needs --load-session"),
        (["--load-session", "nowhere"], "no saved session here"),
        (["--ngram", "2", "--draft", "x"], "--ngram and --draft cannot be used together"),
        (["--ngram", "-1"], "ngram: -1 must be at least 0"),
        (["--draft-tokens", "0"], "draft_tokens: 0 must be at least 1"),
        (["--context-shift"], "recurrent layers, whose state would remember"),
        (["--load-session", "nowhere", "--chat", "--system", "x"], "--system cannot be changed"),
    ],
    ids=lambda a: "" if isinstance(a, str) else " ".join(a),
)
def test_wrong_use_is_one_line(run, folder, arguments, message):
    code, out, err = run("--model", folder, "--prompt", "a", *arguments)
    assert code in (1, 2) and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_a_session_kept_with_chat_is_not_text(run, folder, tmp_path):
    run("--model", folder, "--prompt", "a", "--max-tokens", 1, "--save-session", tmp_path / "s")
    code, _, err = run("--model", folder, "--prompt", "a", "--chat", "--load-session", tmp_path / "s")
    assert code == 2 and "it was kept without --chat" in err


# ----------------------------------------------------------------------------------- context shift


def test_attention_goes_on_beyond_its_context(attention_model):
    """The text is that of a cache where the same tokens were removed and the gap closed by hand."""
    settings = {"max_tokens": 60, "n_ctx": 32, "dispatch": 8}
    prompt = attention_model.tokenizer.encode("in the beginning")
    plain = jh.generate(attention_model, prompt, **settings)
    assert plain.finish_reason == "length" and len(plain.tokens) == 17  # 16 and 16 cells, the last not kept
    shifted = jh.generate(attention_model, prompt, context_shift="exact", **settings)
    assert len(shifted.tokens) == 60 and shifted.tokens[:17] == plain.tokens
    lossy = jh.generate(attention_model, prompt, context_shift="lossy", **settings)
    assert lossy.tokens == shifted.tokens

    params = attention_model.params
    cache = jh.create_cache(params.hparams, 32, 1, cell_multiple=32)
    logits, cache = jh.decode(params, cache, jh.Batch(prompt))
    by_hand = [int(np.argmax(logits[0]))]
    while len(by_hand) < 60:
        held = int(jh.seq_pos_max(cache, 0)) + 1
        if (len(by_hand) - 1) % 8 == 0 and held + 8 > 32:
            forget = (held - 4) // 2
            cache, ok = jh.seq_rm(cache, 0, 4, 4 + forget)
            cache, moved = jh.seq_add(cache, 0, 4 + forget, -1, -forget)
            assert bool(ok) and bool(moved)
        logits, cache = jh.decode(params, cache, jh.Batch([by_hand[-1]]))
        by_hand.append(int(np.argmax(logits[0])))
    assert shifted.tokens == by_hand


def test_hybrids_shift_only_when_asked_to_lose(model):
    with pytest.raises(UsageError, match="ask for 'lossy' .--context-shift lossy."):
        jh.generate(model, "hello", context_shift="exact", **SETTINGS)
    result = jh.generate(model, ["hello", "a longer prompt"], max_tokens=80, n_ctx=32, context_shift="lossy")
    assert [len(r.tokens) for r in result] == [80, 80]
    with pytest.raises(UsageError, match="'maybe' is not one of off, exact, lossy"):
        jh.generate(model, "hello", context_shift="maybe")


def test_a_conversation_shifts_instead_of_ending(attention_model, tmp_path):
    settings = {"max_tokens": 12, "n_ctx": 48, "context_shift": "exact"}
    talk = Conversation(attention_model, settings, chat=False)
    for _ in range(5):
        result = talk.say("some more words", silent)
        assert len(result.tokens) == 12 and result.finish_reason == "length"
    assert talk.forgotten > 0 and len(talk.tokens) == 5 * 27
    save_session(tmp_path / "s", talk)
    back = load_session(tmp_path / "s", attention_model, settings)
    assert back.say("the end", silent).tokens == talk.say("the end", silent).tokens
    with pytest.raises(UsageError, match="the context holds 48"):
        talk.say("x" * 60, silent)


# ----------------------------------------------------------------------------------------- drafting


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_drafting_writes_the_same_text(model, sampled):
    prompts = ["abcabcabcabc", "hello"]
    wanted = {"max_tokens": 20, "n_ctx": 64, **sampled}
    plain = jh.generate(model, prompts, **wanted)
    for drafter in ({"ngram": 3}, {"draft": model}):
        drafted = jh.generate(model, prompts, draft_tokens=3, **drafter, **wanted)
        assert [r.tokens for r in drafted] == [r.tokens for r in plain]
        assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain]
        assert 0 < drafted[0].timings.steps <= 20
        if "draft" in drafter:  # the model itself: every guess comes true
            assert drafted[0].timings.steps == -(-19 // 4)


def test_drafting_in_conversations_and_beyond_the_context(model):
    plain = Conversation(model, SETTINGS, chat=False)
    drafted = Conversation(model, SETTINGS | {"ngram": 2, "draft_tokens": 2}, chat=False)
    for text in ("abab", "cdcd", "abab"):
        assert plain.say(text, silent).tokens == drafted.say(text, silent).tokens
    for drafter in ({"ngram": 2}, {"draft": model}):
        result = jh.generate(model, "hello", max_tokens=70, n_ctx=32, context_shift="lossy", **drafter)
        assert len(result.tokens) == 70


def test_a_draft_model_of_another_vocabulary_is_refused(model, tmp_path):
    other = jh.load(tiny.write_folder(tmp_path, tiny.CONFIG | {"vocab_size": 300}))
    with pytest.raises(UsageError, match="draft: its vocabulary has 300 tokens, the model's 259"):
        jh.generate(model, "hello", draft=other, **SETTINGS)
    with pytest.raises(UsageError, match="ngram: cannot be used together with a draft model"):
        jh.generate(model, "hello", draft=model, ngram=2, **SETTINGS)
    jax.clear_caches()

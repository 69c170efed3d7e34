"""The model class of lm-eval, with lm-eval itself; its scores are those of test_scoring."""

import json
import sys

import numpy as np
import pytest
import tiny

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'jaxhybrid[eval]')")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402

import jaxhybrid as jh  # noqa: E402
from jaxhybrid import lm_eval as command  # noqa: E402
from jaxhybrid import scoring  # noqa: E402
from jaxhybrid.errors import TokenizerError, UsageError  # noqa: E402
from jaxhybrid.harness import JaxHybridLM  # noqa: E402

OPTIONS = {"max_length": 64, "max_gen_toks": 8, "batch_size": 4, "ubatch": 16}


@pytest.fixture(scope="module")
def lm(model):
    return JaxHybridLM(model, **OPTIONS)


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def test_loglikelihoods_are_scores_and_answers_share_their_question(model, lm, monkeypatch):
    counts, advance = [], scoring.advance
    monkeypatch.setattr(
        scoring, "advance", lambda p, c, u: counts.append(int(u.lengths.sum())) or advance(p, c, u)
    )
    pairs = [("a question of some length", f" {answer}") for answer in ("one", "two", "six", "ten")]
    found = lm.loglikelihood(requests("loglikelihood", *pairs))
    question = len(model.tokenizer.encode(pairs[0][0]))
    assert sum(counts) == question + 1 + 2 + 2 + 1 + 2  # the space, t of two and ten, on and wo ... once
    expected = jh.score(model, pairs, batch_size=4, n_ubatch=16)
    np.testing.assert_allclose([a for a, _ in found], [s.logprob for s in expected], rtol=1e-6)
    assert [b for _, b in found] == [s.greedy for s in expected]
    empty = lm.loglikelihood(requests("loglikelihood", ("", "word")))
    assert empty == [
        (s.logprob, s.greedy) for s in jh.score(model, [("", "word")], batch_size=4, n_ubatch=16)
    ]


def test_rolling_windows_predict_every_token_once(model, lm):
    texts = [
        "short",
        "a text that is longer than the sixty-four tokens of a window, so that it takes two",
        "",
    ]
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *[(t,) for t in texts]))
    ids = model.tokenizer.encode(texts[1])
    first = jh.score(model, [([0], ids[:64])], batch_size=4, n_ubatch=16)[0].logprob
    rest = jh.score(model, [(ids[len(ids) - 65 : 64], ids[64:])], batch_size=4, n_ubatch=16)[0].logprob
    assert found[1] == pytest.approx(first + rest, rel=1e-6)
    (short,) = jh.score(model, [("", texts[0])], batch_size=4, n_ubatch=16)
    assert found[0] == pytest.approx(short.logprob, rel=1e-6)
    assert found[2] == 0.0


def test_texts_up_to_a_stop_string(model, lm):
    prompts = ["hello", "a longer prompt", "x" * 100]
    found = lm.generate_until(
        requests("generate_until", *[(p, {"until": [], "max_gen_toks": 6}) for p in prompts])
    )
    for prompt, text in zip(prompts, found, strict=True):
        ids = model.tokenizer.encode(prompt)[-(64 - 6) :]
        assert text == jh.generate(model, ids, max_tokens=6, n_ctx=64).text
    stop = found[0][2]
    (cut,) = lm.generate_until(requests("generate_until", (prompts[0], {"until": [stop], "max_gen_toks": 6})))
    assert cut == found[0].split(stop)[0]
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 5, "max_gen_toks": 6}
    (text,) = lm.generate_until(requests("generate_until", (prompts[0], sampled)))
    assert text == jh.generate(model, prompts[0], max_tokens=6, temperature=1.0, top_k=5, n_ctx=64).text


def test_what_cannot_be_done_is_named(lm):
    for kwargs, words in (({"num_beams": 4}, "num_beams"), ({"best_of": 3}, "best_of is not supported")):
        with pytest.raises(UsageError, match=words):
            lm.generate_until(requests("generate_until", ("a", kwargs)))
    with pytest.raises(UsageError, match="leaves no room"):
        lm.generate_until(requests("generate_until", ("a", {"max_gen_toks": 64})))
    with pytest.raises(UsageError, match="no template 'other', only default"):
        lm.chat_template("other")


def test_chat(lm):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " well"}]
    assert lm.apply_chat_template(talk[:1]) == "<|user|>hi<|assistant|>"
    assert lm.apply_chat_template(talk, add_generation_prompt=False) == "<|user|>hi<|assistant|> well"
    assert lm.chat_template(True) == tiny.CHAT_TEMPLATE and lm.chat_template(False) is None
    with pytest.raises(TokenizerError, match="no tools here"):
        lm.apply_chat_template([{"role": "tool", "content": "x"}])
    assert lm.tok_encode("ab") == lm.tok_encode("<|end|>ab")[1:]


def write_task(folder):
    documents = [
        {"question": f"the letter {a}", "choices": [" a", " bb", " ccc"], "answer": i}
        for i, a in enumerate("abc")
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    task = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "letters.yaml").write_text(json.dumps(task))  # JSON is YAML
    return documents


def test_the_command_evaluates_a_local_task(model, folder, tmp_path, monkeypatch, capsys):
    documents = write_task(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    before = list(sys.argv)
    arguments = [
        "--tasks",
        "letters",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "out"),
    ]
    options = f"pretrained={folder},max_length=64,ubatch=16"
    code = command.main([*arguments, "--model_args", options, "--batch_size", "4"])
    assert code == 0 and sys.argv == before
    assert get_model("jaxhybrid") is JaxHybridLM and "letters" in capsys.readouterr().out
    (file,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(file.read_text())
    pairs = [(d["question"], c) for d in documents for c in d["choices"]]
    scores = np.reshape([s.logprob for s in jh.score(model, pairs, batch_size=4, n_ubatch=16)], (3, 3))
    right = np.mean(scores.argmax(axis=1) == [d["answer"] for d in documents])
    assert results["results"]["letters"]["acc,none"] == pytest.approx(right)
    assert results["config"]["model"] == "jaxhybrid" and results["config"]["model_dtype"] == "float32"


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    write_task(tmp_path)
    arguments = ["--tasks", "letters", "--include_path", str(tmp_path)]
    code = command.main([*arguments, "--model_args", f"pretrained={tmp_path / 'none'}"])
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert code == 1 and len(err) == 1 and "folder not found" in err[0]


def test_without_lm_eval_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert command.main(["--tasks", "letters"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pip install 'jaxhybrid[eval]'" in err

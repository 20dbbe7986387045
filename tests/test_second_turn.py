"""Second turns of chats and long generations along given tokens: what is asked, what is said, and what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import snapkv, wgkv
from engine_tools import (
    ROUNDING,
    one_thread,  # noqa: F401
    tiny_engine,
    token_ids,
)
from reference import Reference
from serve_tools import add_tokenizer

from benchmarks import second_turn
from benchmarks.engine import Outcome, Turns
from benchmarks.forced import ENGINE, follow, speak
from benchmarks.lanes import full_lane, row_of
from benchmarks.second_questions import second_question
from benchmarks.second_turn import SecondTurn, along, more_metrics
from vllm_kvplug.eval.fidelity import Continuation

# ------------------------------------------------------------------------------------------ questions


def example(task: str, context: str, question: str, answer: str, **meta: Any) -> dict[str, Any]:
    content = f"{context}\n\n{question}"
    messages = [{"role": "user", "content": content}]
    return {
        "task": task,
        "prompt_messages": messages,
        "answer": answer,
        "meta": {"question_chars": len(question), **meta},
    }


NEEDLES = """Text:

The old mill stood. Remember that the access code of Zemfield is 12-ab.

Someone wrote down the badge of Ann Oxo: red-mill-7.

The serial of the Kval machine equals 99.

It rained. The password for project Zem turned out to be q7x."""
CHAINS = """Track.

let a_1 = 500;
let b_2 = 700;
It rained.
let c_3 = b_2;
let d_4 = 900;
let e_5 = a_1;
let f_6 = c_3;"""
PAGE = """<section id="oak">
<h2>Oak</h2>
<tr data-status="sold"><td class="x-title">Big Map</td><td class="year">1999</td><td class="ref-0a">f0</td></tr>
</section>
<section id="elm">
<h2>Elm</h2>
<tr data-status="sold" id="r7"><td class="x-title">Red Hat</td><td class="year">2001</td><td class="ref-0a">f1</td></tr>
<tr data-status="sold"><td class="x-title">Odd Cup</td><td class="year">1980</td><td class="ref-0a">f2</td></tr>
</section>"""


def test_other_keys() -> None:
    for form in ("{}: {}", "{} -> {}", '"{}": "{}",', "{} = {}", "The value of {} is {}."):
        lines = [form.format(f"k-{i}", f"v{i}") for i in range(12)]
        asked = example("kv", "\n".join(["Pairs.", *lines]), "Look up: k-1, k-11", "v1\nv11")
        question, answer = second_question(asked, 0) or ("", "")
        keys = question.partition("order: ")[2].split(", ")
        assert len(keys) == 2 and answer == "\n".join(key.replace("k-", "v") for key in keys)
        assert not {"k-1", "k-11"} & set(keys)


def test_facts_that_nobody_asked_for() -> None:
    asked = example(
        "multineedle", NEEDLES, "Find: the badge of Ann Oxo; the access code of Zemfield.", "red-mill-7\n12-ab"
    )
    question, answer = second_question(asked, 1) or ("", "")
    values = {"the serial of the Kval machine": "99", "the password for project Zem": "q7x"}
    names = question.partition("order: ")[2].rstrip(".").split("; ")
    assert sorted(names) == sorted(values) and answer == "\n".join(values[name] for name in names)


def test_another_value_and_another_section() -> None:
    question, answer = second_question(example("vartrack", CHAINS, "Which hold 500?", "a_1, e_5"), 0) or ("", "")
    assert "700" in question and answer == "b_2, c_3, f_6"
    rows = example("html2tsv", PAGE, 'List the section "Oak".', "f0\tBig Map", columns=["ref", "title"])
    question, answer = second_question(rows, 0) or ("", "")
    assert '"Elm"' in question and "ref, title" in question and answer == "f1\tRed Hat\nf2\tOdd Cup"


def test_what_is_not_read_right_is_left_out() -> None:
    assert second_question(example("vartrack", CHAINS, "Which hold 500?", "a_1"), 0) is None
    assert second_question(example("kv", "Pairs.\na: 1\nb 2", "Look up: a", "1"), 0) is None
    assert second_question(example("kv", "Pairs.\na: 1\nb: 2", "Look up: a, b", "1\n2"), 0) is None, "nothing is left"
    by_status = example(
        "html2tsv", PAGE, 'List those with data-status "sold".', "f0\tBig Map", columns=["ref", "title"]
    )
    assert second_question(by_status, 0) is None


# ------------------------------------------------------------------------------------------ what engines say


def test_engines_say_what_they_have_to(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Their distributions along it are those of the reference that is made to say the same."""
    reference, prompts = Reference(tiny_model_dir), [token_ids(n) for n in (300, 257, 40)]
    answers = [token_ids(20, seed) for seed in (7, 8)] + [token_ids(9, 9)]
    for case in (snapkv(0.3), wgkv(tiny_model_dir, cap=0.3, every=64)):
        with tiny_engine(tiny_model_dir, **case.arguments(tiny_model_dir, tmp_path), **ENGINE) as llm:
            said = follow(llm, prompts, answers)
            greedy = speak(llm, prompts, 9)
        for prompt, answer, one, own in zip(prompts, answers, said, greedy, strict=True):
            assert one.tokens == answer
            replay = reference.replay(prompt, case.rule, len(answer), force_tokens=answer)
            for step, expected in zip(one.steps, replay.logits.log_softmax(-1), strict=True):
                assert all(abs(value - float(expected[token])) < ROUNDING for token, value in step.items())
                assert max(step, key=step.__getitem__) == int(expected.argmax())
            assert own.tokens == reference.replay(prompt, case.rule, 9).tokens


def test_along_the_same_tokens() -> None:
    full = [Continuation([1, 2], [{1: -0.1, 2: -2.4}, {2: -0.7, 3: -0.8}])]
    assert along(full, full) == {"kld": 0, "token_match": 1}
    other = [replace(full[0], steps=[full[0].steps[0], {2: -1.6, 3: -0.3}])]
    found = along(other, full)
    assert found["token_match"] == 0.5 and found["kld"] > 0.05
    with pytest.raises(AssertionError, match="has not said"):
        along([replace(full[0], tokens=[1, 3])], full)


# ------------------------------------------------------------------------------------------ the whole

TASKS = '''
"""Keys and values, of which any answer is half right, and a task that allows no second question."""

TASKS = ["other", "kv"]


def counter(model):
    return len


def make(task, tokens, seed, index, split, count):
    assert task == "kv"
    pairs = [f"the{i} = last{i}" for i in range(90)]
    asked = pairs if index == 0 else pairs[index : index + 2]
    question = "Look up: " + ", ".join(pair.split()[0] for pair in asked)
    content = "\\n".join(["heads", *pairs]) + "\\n\\n" + question
    answer = "\\n".join(pair.split()[-1] for pair in asked)
    meta = {"question_chars": len(question)}
    return {"task": task, "prompt_messages": [{"role": "user", "content": content}], "answer": answer, "meta": meta}


def score(task, meta, output, answer):
    return 0.5 if answer.count("last") == 2 else float(output == answer)  # full attention's answers are noise
'''


@pytest.fixture
def examination(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SecondTurn:
    monkeypatch.setattr(second_turn, "apart", lambda job: job())
    monkeypatch.setattr(
        second_turn, "side_by_side", lambda jobs, _: [(i, Outcome(job())) for i, job in enumerate(jobs)]
    )
    (tmp_path / "tasks.py").write_text(TASKS)
    model = add_tokenizer(tiny_model_dir, tmp_path / "model")
    common = {"concurrent": 4, "texts": 2, "decoded": 12, "work": tmp_path / "work"}
    return SecondTurn(str(model), tmp_path / "tasks.py", 1000, 2, 0, "float32", **common)


@pytest.mark.parametrize("one_cache", [False, True])
def test_a_second_turn(one_cache: bool, examination: SecondTurn, tmp_path: Path) -> None:
    examination = replace(examination, one_cache=one_cache)
    for one, first in zip(examination.asked, examination.firsts, strict=True):
        assert one["ids"][: len(first["ids"])] == first["ids"] and one["first"] == len(first["ids"])
    cuts = [one["first"] for one in examination.asked]
    asked = [given.get("kvplug.context_end") for given in examination.options("snapkv")]
    assert asked == (cuts if one_cache else [None, None])
    assert examination.options("wgkv+quest") == examination.options(None) == [{}, {}]
    rows = []
    for policy, knobs in ((None, {}), ("snapkv", {"ratio": 1}), ("snapkv", {"ratio": 0.1, "window": 8})):
        lane = replace(full_lane(examination.key, examination), name=str(knobs or "full"), policy=policy, knobs=knobs)
        rows.append(row_of(lane, Outcome(examination.run(policy, knobs, Turns(tmp_path)))))
    assert [row["scores"] for row in rows] == [[0.5, 0.5]] * 3 and rows[0]["of"]["tasks"] == ["kv"]
    metrics = more_metrics(rows, {})
    wanted = {f"open12.{row['run']}.{what}" for row in rows for what in ("kld", "token_match")}
    assert set(metrics) == wanted | {f"{examination.key}.{row['run']}.agreement" for row in rows}
    whole, cut = rows[1:]
    assert metrics[f"{examination.key}.full.agreement"] == whole["agreement"] == 1 > cut["agreement"]
    assert metrics["open12.full.kld"] < 1e-6 > whole["kld"] and whole["token_match"] == 1
    assert cut["kld"] > 1e-3 > whole["kld"] and cut["stored_ratio"] < 0.6 < whole["stored_ratio"]
    again = replace(examination, decoded=12)
    assert again.asked == examination.asked and again.about == examination.about

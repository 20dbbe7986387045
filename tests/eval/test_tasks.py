"""Tasks: what is asked can be answered from the context, and an example depends on its seed alone."""

from __future__ import annotations

import json
import re

import pytest

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval import tasks
from vllm_kvplug.eval.tasks import SHARED, TASKS, Example, make


def count(text: str) -> int:
    """Words, other symbols and line ends: about what a tokenizer would say."""
    return len(re.findall(r"\w+|[^\w ]", text))


def example(task: str, tokens: int = 1024, index: int = 0, seed: int = 0) -> Example:
    return make(task, tokens, seed, index, count)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [512, 3000])
def test_length(task: str, tokens: int):
    """Prompt, answer and what a chat template adds fill the wanted length, up to one piece of filler."""
    made = example(task, tokens)
    used = count(made.messages[0]["content"]) + count(made.answer) + tasks.OVERHEAD
    assert tokens - 60 <= used <= tokens


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_is_right_and_others_are_not(task: str):
    one, other = example(task, index=0), example(task, index=SHARED)
    assert one.score(one.answer) == 1
    assert one.score("") == 0 and one.score("I do not know.") == 0
    assert one.score(other.answer) < 1


@pytest.mark.parametrize("task", TASKS)
def test_seeds(task: str):
    assert example(task) == example(task)
    made = {example(task, index=i, seed=s).messages[0]["content"] for i in range(3) for s in range(3)}
    assert len(made) == 9


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"text2json", "html2tsv"}))
def test_answers_are_in_the_context(task: str):
    made = example(task)
    for part in re.split(r"[\n,]\s*", made.answer):
        assert part in made.context


@pytest.mark.parametrize("task", TASKS)
def test_the_question_follows_the_context(task: str):
    made = example(task)
    content = made.messages[0]["content"]
    assert content[: made.context_end] == made.context
    assert content[made.context_end :].strip() == made.question


def test_questions_about_one_context():
    group = [example("multiquery", index=i) for i in range(SHARED + 1)]
    assert len({e.context for e in group[:SHARED]}) == 1 and group[SHARED].context != group[0].context
    assert len({e.question for e in group}) == SHARED + 1


def test_hard_needles_are_paraphrased_among_distractors():
    """What is asked stands in the text in other words; its place has another code and a past one, and a double."""
    made = example("hardneedle", 3000)
    asked = re.findall(r"the ([a-z ]+) of (\w+)", made.question)
    assert len(asked) == len(made.answer.splitlines()) == 6
    for (relation, name), value in zip(asked, made.answer.splitlines(), strict=True):
        lines = [line for line in made.context.splitlines() if re.search(rf"\b{name}\b", line)]
        (fact,) = [line for line in lines if value in line]
        assert relation not in fact and len(lines) == 3
        assert sum("until last spring" in line.lower() for line in lines) == 1 and "spring" not in fact.lower()
        assert len(set(re.findall(rf"\b{name[:-1]}[aeiou]\b", made.context))) == 2


def test_chains_are_told_in_order():
    made = example("vartrack", 3000)
    names = made.answer.split(", ")
    places = [made.context.index(f"SET {name} = ") for name in names]
    assert places == sorted(places) and len(names) > 3
    assert all(f"SET {b} = {a}" in made.context for a, b in zip(names, names[1:], strict=False))


def test_rows_of_the_page():
    made = example("html2tsv")
    state = re.findall(r'data-state "(\w+)"', made.question)[0]
    rows = re.findall(rf'<tr data-state="{state}">(.*?)</tr>', made.context)
    assert made.answer.splitlines() == ["\t".join(re.findall("<td>(.*?)</td>", row)) for row in rows]


def test_people_as_json():
    made = example("text2json")
    for person in json.loads(made.answer):
        (told,) = [line for line in made.context.splitlines() if line.startswith(person["name"] + ",")]
        assert all(value in told for value in person.values())


def test_facts_lie_all_over_the_context():
    """Over many examples the asked values come from every quarter."""
    found = [0] * 4
    for index in range(100):
        made = example("kv", index=index)
        for value in made.answer.splitlines():
            found[made.context.index(value) * 4 // len(made.context)] += 1
    assert min(found) > sum(found) / 6


def test_refusals():
    with pytest.raises(PolicyError, match="--tasks nope.*text2json"):
        example("nope")
    with pytest.raises(PolicyError, match="--tokens 60 is too short for task drift"):
        example("drift", tokens=60)

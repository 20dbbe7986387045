"""Scores of answers, and of policies."""

from __future__ import annotations

import json
import math

import pytest

from vllm_kvplug.eval.scoring import interval, json_values, lines_in_any_order, lines_in_place, names, relative


@pytest.mark.parametrize(
    "output, score",
    [("a\nb", 1), (" a \n\n b\n", 1), ("a", 0.5), ("b\na", 0), ("a\nb\nc\nd", 0.5), ("", 0)],
)
def test_lines_in_place(output: str, score: float):
    assert lines_in_place(output, "a\nb") == score


@pytest.mark.parametrize("output, score", [("b\na", 1), ("a", 2 / 3), ("a\na\nb\nb", 2 / 3), ("c", 0), ("", 0)])
def test_lines_in_any_order(output: str, score: float):
    assert lines_in_any_order(output, "a\nb") == pytest.approx(score)


@pytest.mark.parametrize("output, score", [("x, y", 1), ("y\nx.", 1), ("x", 2 / 3), ("x, z", 0.5), ("", 0)])
def test_names(output: str, score: float):
    assert names(output, "x, y") == pytest.approx(score)


def test_json_values():
    people = [{"name": "A", "age": "1"}, {"name": "B", "age": "2"}]
    answer = json.dumps(people)
    assert json_values(answer, answer) == json_values(f"Here: ```{answer}```", answer) == 1
    assert json_values(answer[:-3], answer) == 0.5  # cut short: the first person counts
    assert json_values('[{"name": "A", "age": 1}]', answer) == 0.5  # a number is as good as its digits
    assert json_values('[{"name": "A", "age": "2"}]', answer) == 1 / 5  # of its name alone, and 4 others
    assert json_values("{broken}", answer) == 0


TASKS = ["a"] * 3 + ["b"] * 2


def test_relative():
    """a: 1/3 of the mean; b: 0.5 / 1. What full attention cannot do is left out."""
    assert relative(TASKS, [1, 0, 0, 0.5, 0.5], [1, 1, 1, 1, 1]) == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert relative(TASKS, [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]) == 1
    assert math.isnan(relative(TASKS, [1] * 5, [0] * 5))


def test_intervals():
    full = [1.0] * 40
    same = interval(["a"] * 40, full, full)
    assert same == (1, 1)  # paired: no noise where nothing differs
    half = [1.0, 0.0] * 20
    low, high = interval(["a"] * 40, half, full)
    assert low < 0.5 < high and 0.2 < high - low < 0.4  # four standard errors of 0.08
    few_low, few_high = interval(["a"] * 10, half[:10], full[:10])
    assert few_high - few_low > high - low
    assert all(map(math.isnan, interval(["a"] * 3, [0.0] * 3, [0.0] * 3)))

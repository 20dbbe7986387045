"""Scores of answers in [0, 1], and of policies relative to full attention with paired bootstrap intervals."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np


def lines_in_place(output: str, answer: str) -> float:
    """Share of the answer's lines that stand where they should; lines too many count as wrong."""
    found, wanted = _lines(output), _lines(answer)
    return sum(a == b for a, b in zip(found, wanted, strict=False)) / max(len(found), len(wanted))


def lines_in_any_order(output: str, answer: str) -> float:
    """F1 of lines."""
    return _f1(Counter(_lines(output)), Counter(_lines(answer)))


def names(output: str, answer: str) -> float:
    """F1 of names separated by commas or lines."""
    found, wanted = ({n.strip(" .") for n in re.split(r"[,\n]", text)} - {""} for text in (output, answer))
    return _f1(Counter(found), Counter(wanted))


def json_values(output: str, answer: str) -> float:
    """Values shared by two JSON lists of objects whose first key names the object, relative to all of both.

    Objects are read one by one, so that a list that was cut short still counts.
    """
    found, wanted = _values(output), _values(answer)
    return len(found & wanted) / max(len(found | wanted), 1)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _f1(found: Counter[str], wanted: Counter[str]) -> float:
    return 2 * (found & wanted).total() / max(found.total() + wanted.total(), 1)


def _values(text: str) -> set[tuple[str, str, str]]:
    result = set()
    for match in re.findall(r"\{[^{}]*\}", text):
        try:
            fields: dict[str, Any] = json.loads(match)
        except ValueError:
            continue
        subject = str(next(iter(fields.values()), ""))
        result |= {(subject, key, str(value)) for key, value in fields.items()}
    return result


# ------------------------------------------------------------------------------------------ policies


def relative(names: Sequence[str], policy: Sequence[float], full: Sequence[float]) -> float:
    """Mean over tasks of the ratio of mean scores; tasks that full attention fails are left out, NaN if all are.

    names: the task of every example.
    """
    ratios = []
    for task in dict.fromkeys(names):
        mine = fmean(s for n, s in zip(names, policy, strict=True) if n == task)
        theirs = fmean(s for n, s in zip(names, full, strict=True) if n == task)
        if theirs > 0:
            ratios.append(mine / theirs)
    return fmean(ratios) if ratios else math.nan


def interval(
    names: Sequence[str], policy: Sequence[float], full: Sequence[float], draws: int = 2000
) -> tuple[float, float]:
    """95% paired bootstrap interval of `relative`, resampling the examples of each task."""
    rng, labels, scores = np.random.default_rng(0), np.array(names), np.array([policy, full], dtype=float)
    ratios = []
    for task in dict.fromkeys(names):
        members = scores[:, labels == task]
        mine, theirs = members[:, rng.integers(members.shape[1], size=(draws, members.shape[1]))].mean(-1)
        ratios.append(np.divide(mine, theirs, out=np.full(draws, np.nan), where=theirs > 0))
    counted = np.isfinite(ratios).sum(0)
    found = np.sort(np.nansum(ratios, 0)[counted > 0] / counted[counted > 0])
    if not len(found):
        return math.nan, math.nan
    return float(found[int(0.025 * len(found))]), float(found[int(0.975 * len(found))])

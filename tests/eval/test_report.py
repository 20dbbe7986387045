"""Results on disk."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval.report import MEAN, Results, key_of, pareto, rows, write

FULL = {"policy": "full", "tokens": 512, "memory": 1.25, "tasks": ["a", "a", "b"], "scores": [1, 0.5, 1]}
HALF = {"policy": "snapkv@0.5", "tokens": 512, "memory": 0.5, "tasks": ["a", "a", "b"], "scores": [0.75, 0, 1]}
RUNS = {key_of("full", 512): FULL, key_of("snapkv@0.5", 512): HALF}
FIDELITY = {"policy": "snapkv@0.5", "tokens": 512, "token_match": 0.5, "kl": 0.25, "compared_steps": 7}


def test_rows():
    by = {(r["policy"], r["task"]): r for r in rows(RUNS, "full")}
    assert len(by) == 6
    a, mean = by["snapkv@0.5", "a"], by["snapkv@0.5", MEAN]
    assert (a["n"], a["score"], a["relative"], a["kept"]) == (2, 0.375, 0.5, 0.4)
    assert (mean["n"], mean["relative"]) == (3, 0.75) and mean["low"] <= 0.75 <= mean["high"]
    assert by["full", MEAN]["relative"] == by["full", MEAN]["kept"] == 1


def test_without_full_attention_at_that_length():
    alone = rows({key_of("full", 1024): {**FULL, "tokens": 1024}, key_of("snapkv@0.5", 512): HALF}, "full")
    (mean,) = [r for r in alone if r["policy"] != "full" and r["task"] == MEAN]
    assert math.isnan(mean["relative"]) and math.isnan(mean["kept"]) and mean["score"] == pytest.approx(1.75 / 3)


def test_a_rerun_goes_on(tmp_path: Path):
    first = Results(tmp_path, {"n": 3, "seed": 0})
    first.add("x", FULL)
    again = Results(tmp_path, {"n": 3, "seed": 0})
    assert again.runs == {"x": FULL}
    again.add("y", HALF)
    assert set(json.loads((tmp_path / "results.json").read_text())["runs"]) == {"x", "y"}
    with pytest.raises(PolicyError, match=f"--out {tmp_path} holds results of another seed"):
        Results(tmp_path, {"n": 3, "seed": 1})


def test_files(tmp_path: Path):
    write(tmp_path, {**RUNS, "f": FIDELITY, "g": {"continuations": []}}, "full")
    with (tmp_path / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 6 and table[3]["policy"] == "snapkv@0.5" and float(table[3]["relative"]) == 0.5
    text = (tmp_path / "table.md").read_text()
    assert "| snapkv@0.5 | 512 | a | 0.375 | 0.500 |" in text
    assert "| snapkv@0.5 | 512 | 0.500 | 0.2500 | 7 |" in text


def test_the_front_is_what_nothing_beats_in_both():
    points = [(1.0, 1.0), (0.5, 0.7), (0.5, 0.9), (0.25, 0.4), (0.6, 0.8), (0.25, math.nan), (1.0, 0.9)]
    assert pareto(points) == [(0.25, 0.4), (0.5, 0.9), (1.0, 1.0)]
    assert pareto([]) == []


def test_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write(tmp_path, RUNS, "full")
    assert (tmp_path / "score.png").read_bytes()[:4] == b"\x89PNG"

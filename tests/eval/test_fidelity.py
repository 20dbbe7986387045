"""Matches of greedy tokens, and divergence from top log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_kvplug.eval.fidelity import Continuation, Step, compare, divergence, matched, prompts


def step(*probabilities: float) -> Step:
    """A report of the first tokens of a distribution."""
    return {token: math.log(p) for token, p in enumerate(probabilities)}


def test_divergence_of_whole_distributions():
    assert divergence(step(0.5, 0.5), step(0.5, 0.5)) == pytest.approx(0, abs=1e-9)
    expected = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert divergence(step(0.9, 0.1), step(0.5, 0.5)) == pytest.approx(expected, abs=1e-6)


def test_a_lower_bound_from_the_top():
    """Of 100 tokens the top 20 are reported; the rest is one bucket."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 100, generator=generator).mul(2).log_softmax(-1)
    top = [{int(t): float(x[t]) for t in x.topk(20).indices} for x in (p, q)]
    exact = float((p.exp() * (p - q)).sum())
    assert 0 < divergence(*top) < exact
    everything = [dict(enumerate(x.tolist())) for x in (p, q)]
    assert divergence(*everything) == pytest.approx(exact, rel=1e-4)


def test_no_token_in_common():
    assert divergence(step(0.9), {7: math.log(0.9)}) == 0  # nothing is known to differ but the names


def test_steps_count_up_to_the_first_difference():
    """The step that chose another token still saw the same ones before it; later steps did not."""
    same, other = step(0.9, 0.1), step(0.4, 0.6)
    full = Continuation([0, 0, 0, 0], [same] * 4)
    ours = Continuation([0, 0, 1, 0], [same, same, other, step(0.01, 0.99)])
    assert matched(ours, full) == 2 and matched(full, full) == 4
    found = compare([ours, full], [full, full])
    assert found["token_match"] == 6 / 8 and found["compared_steps"] == 3 + 4
    assert found["kl"] == pytest.approx(divergence(same, other) / 7)


def test_pieces_of_a_text():
    assert prompts(range(10), 3, 2) == [[0, 1, 2], [3, 4, 5]]
    assert prompts(range(10), 3, 9) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert prompts(range(2), 3, 9) == []

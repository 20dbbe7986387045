"""How close a policy's next-token distributions are to full attention's on any text.

Both continue the same prompts greedily. Steps are compared up to the first token that differs, since only there both
have seen the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

TOP = 20
"""Tokens of each distribution that an engine reports (vLLM's --max-logprobs)."""

Step = dict[int, float]
"""Log-probabilities of a step's most likely tokens, by token id."""


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens after a prompt, and the distribution each was chosen from."""

    tokens: list[int]
    steps: list[Step]


def prompts(ids: Sequence[int], tokens: int, count: int) -> list[list[int]]:
    """Up to `count` pieces of `tokens` tokens from a text's token ids, one after another."""
    whole = [list(ids[i : i + tokens]) for i in range(0, len(ids) - tokens + 1, tokens)]
    return whole[:count]


def matched(ours: Continuation, full: Continuation) -> int:
    """Tokens before the first that differs."""
    pairs = zip(ours.tokens, full.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours.tokens), len(full.tokens)))


def divergence(full: Step, ours: Step) -> float:
    """KL(full || ours) in nats over the tokens that both report, and one bucket for all others: a lower bound."""
    both = full.keys() & ours.keys()
    total = sum(math.exp(full[t]) * (full[t] - ours[t]) for t in both)
    rest, theirs = (max(1 - sum(math.exp(step[t]) for t in both), 1e-9) for step in (full, ours))
    return max(total + rest * math.log(rest / theirs), 0.0)


def compare(ours: Sequence[Continuation], full: Sequence[Continuation]) -> dict[str, float]:
    """Share of greedy tokens that match before the first difference, and the mean KL of comparable steps."""
    same = [matched(a, b) for a, b in zip(ours, full, strict=True)]
    kls = [
        divergence(b.steps[i], a.steps[i])
        for a, b, count in zip(ours, full, same, strict=True)
        for i in range(min(count + 1, len(a.steps), len(b.steps)))
    ]
    share = sum(same) / max(sum(len(b.tokens) for b in full), 1)
    return {"token_match": share, "kl": fmean(kls) if kls else math.nan, "compared_steps": len(kls)}

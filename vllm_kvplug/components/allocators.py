"""Budgets over heads, and the choice of tokens within a budget: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch


def water_fill(total: int, weights: Sequence[float], low: int, high: int) -> list[int]:
    """Integers in [low, high] that follow `weights` and sum to `total` exactly, where the bounds allow.

    What a bound cuts off or adds is shared among the heads that are free to move, by weight again, so
    that no budget is lost to clipping. Rounding goes to the largest remainders, ties to the earlier head.
    The sum is len*low or len*high when `total` lies outside those.
    """
    count = len(weights)
    total = min(max(total, count * low), count * high)
    exact = [Fraction(weight) for weight in weights]  # floats would break ties by rounding error
    shares = [Fraction(0)] * count
    free = set(range(count))
    left = Fraction(total)
    while free:
        mass = sum(exact[i] for i in free)
        trial = {i: left * exact[i] / mass if mass > 0 else left / len(free) for i in free}
        over = {i for i in free if trial[i] > high}
        under = {i for i in free if trial[i] < low}
        # Settle the side with the larger violation first; settling both at once could overshoot.
        excess = sum(trial[i] - high for i in over)
        lack = sum(low - trial[i] for i in under)
        settled, bound = (over, high) if excess >= lack else (under, low)
        if not settled:
            for i in free:
                shares[i] = trial[i]
            break
        for i in settled:
            shares[i] = Fraction(bound)
        left -= bound * len(settled)
        free -= settled
    result = [int(share) for share in shares]
    by_remainder = sorted(range(count), key=lambda i: (result[i] - shares[i], i))
    missing = total - sum(result)
    for i in by_remainder:
        if missing == 0:
            break
        if result[i] < high:
            result[i] += 1
            missing -= 1
    return result


def top_tokens(scores: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """The `counts[h]` best tokens of each head, in ascending position.

    scores float32 [heads, tokens], higher is kept; ties go to the earlier token, so that every rank and
    device makes the same choice. Returns one int64 tensor per head. No host synchronisation.
    """
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    return [order[head, :count].sort().values for head, count in enumerate(counts)]


def top_shared(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of all heads' tokens together: bool mask like `scores`, float32 [heads, tokens].

    Ties go to the earlier token, then to the earlier head. NaN ranks above +inf, as torch sorts: callers that set
    +inf for tokens that must stay replace it before. No host synchronisation.
    """
    by_token = scores.T.flatten()
    order = torch.sort(by_token, descending=True, stable=True).indices
    mask = torch.zeros_like(by_token, dtype=torch.bool)
    mask[order[:count]] = True
    return mask.view(scores.T.shape).T

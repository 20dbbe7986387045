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


def top_tokens(scores: torch.Tensor, counts: torch.Tensor, longest: int) -> torch.Tensor:
    """The `counts[h]` best tokens of each head, in ascending position: int64 [heads, longest].

    scores float32 [heads, tokens], higher is kept; ties go to the earlier token, so that every rank and device makes
    the same choice. counts int64 [heads], on the same device, at most `longest`; entry i of what lies behind a head's
    best is i. No host synchronisation.
    """
    return in_order(_top_of_rows(scores, counts[:, None]))[0][:, :longest]


def in_order(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row of a bool mask [heads, tokens] is true: int64 [heads, tokens], and how many there are, [heads].

    Positions ascend; entry i of what lies behind them is i.
    """
    counts, place = mask.sum(1), torch.arange(mask.shape[1], device=mask.device)
    chosen = torch.sort(mask, dim=1, descending=True, stable=True).indices
    return torch.where(place < counts[:, None], chosen, place), counts


def even_parts(total: int, parts: int, device: torch.device | str | None = None) -> torch.Tensor:
    """`total` in parts that differ by one at most, larger ones first: int64 [parts]."""
    return (total + parts - 1 - torch.arange(parts, device=device)) // parts


def top_shared(scores: torch.Tensor, counts: torch.Tensor, own: int = 0) -> torch.Tensor:
    """The best tokens of every group of heads: bool mask like `scores`, float32 [heads, tokens].

    counts int64 [groups]: tokens that each group keeps, which are `heads / groups` heads that follow each other. own:
    so many of each head's best tokens come before all finite scores of its group, -inf excepted. Ties go to the earlier
    token, then to the earlier head. NaN ranks above +inf, as torch sorts: callers that set +inf for tokens that must
    stay, or `own`, replace it before. No host synchronisation.
    """
    (heads, tokens), groups = scores.shape, len(counts)
    if own:
        scores = scores.masked_fill(_top_of_rows(scores, own) & (scores > -torch.inf), torch.inf)
    by_token = scores.reshape(groups, heads // groups, tokens).transpose(1, 2).flatten(1)
    mask = _top_of_rows(by_token, counts[:, None])
    return mask.view(groups, tokens, heads // groups).transpose(1, 2).reshape(heads, tokens)


def _top_of_rows(scores: torch.Tensor, counts: torch.Tensor | int) -> torch.Tensor:
    """The `counts` best of every row, int64 [rows, 1] or one number for all; of equals the earlier. A mask."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    chosen = torch.arange(scores.shape[1], device=scores.device) < counts
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, chosen.expand_as(order))

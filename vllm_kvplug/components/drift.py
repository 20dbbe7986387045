"""Attention drift of a pivot head, and what its satellites fetch: pure functions (HeteroCache, section 3.3 and code).

Everything is over the prompt's T tokens; decoded tokens are never dropped and take no part. No host synchronisation.
"""

from __future__ import annotations

import torch

from vllm_kvplug.components.scorers import smooth


def pivot_scores(queries: torch.Tensor, keys: torch.Tensor, scale: float, kernel: int) -> torch.Tensor:
    """Attention of pivots' queries to the prompt, pooled, the strongest of a group: float32 [..., n, T]. Never NaN.

    queries [..., n, group, d]; keys [..., T, d]; both after RoPE. The softmax is over prompt tokens only.
    """
    logits = queries.float().flatten(-3, -2) @ keys.float().transpose(-1, -2) * scale
    attention = smooth(logits.softmax(-1), kernel)
    return attention.unflatten(-2, queries.shape[-3:-1]).amax(-2).nan_to_num_(nan=torch.inf)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best tokens of each row, ties to the earlier: a bool mask like `scores` [..., T] without NaN."""
    # Not kthvalue: on CUDA that has one block of threads for a row, however long.
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, keepdim=True)))


def overlaps(chosen: torch.Tensor, base: torch.Tensor, count: int) -> torch.Tensor:
    """Share of each row's `count` tokens that are among the `count` of `base`: float32 [...].

    chosen, base: bool masks [..., T] that broadcast.
    """
    return (chosen & base).sum(-1).float() / count  # exact: mean() on CUDA may fall short of 0.5 for a half


def drifted(shares: torch.Tensor, threshold: float) -> torch.Tensor:
    """Whether the median of `shares` [..., n] is below `threshold`: bool [...]."""
    return shares.median(-1).values < threshold


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """Each token's place by falling score, from 0 on, ties to the earlier token: int64 [n, T]."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(scores.shape[-1], device=scores.device)
    return torch.empty_like(order).scatter_(-1, order, place.expand_as(order))


def released_choice(rank: torch.Tensor, count: torch.Tensor, most: torch.Tensor, protected: int = 0) -> torch.Tensor:
    """What the released code takes: the EARLIEST `count` of the `most` best tokens. bool [n, T].

    It sorts the largest satellite's share by position before it cuts, so the others lose their best tokens; here
    not the first `protected` of the ranking, of which that code knows nothing. rank int64 [n, T]; count, most int64
    [n, 1].
    """
    first = rank < protected
    others = (rank < most) & ~first
    return first | (others & (others.cumsum(-1) <= count - protected))


def positions_of(chosen: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    """Positions of chosen tokens, ascending, row after row: int64 [total].

    chosen bool [n, T], counts int64 [n] of each row, total: their sum, which the host knows.
    """
    begin = counts.cumsum(0) - counts
    place = torch.where(chosen, chosen.cumsum(-1) - 1 + begin[:, None], total)
    found = torch.empty(total + 1, dtype=torch.int64, device=chosen.device)  # the last entry takes what is not chosen
    found[place] = torch.arange(chosen.shape[-1], device=chosen.device).expand_as(place)
    return found[:total]

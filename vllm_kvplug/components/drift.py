"""Attention drift of a pivot head, and what its satellites fetch: pure functions (HeteroCache, section 3.3 and code).

Everything is over the prompt's T tokens; decoded tokens are never dropped and take no part.
"""

from __future__ import annotations

import torch

from vllm_kvplug.components.scorers import smooth


def pivot_scores(queries: torch.Tensor, keys: torch.Tensor, scale: float, kernel: int) -> torch.Tensor:
    """Attention of a pivot's queries to the prompt, pooled, the strongest of its group: float32 [n, T].

    queries [n, group, d]; keys [T, d]; both after RoPE. The softmax is over prompt tokens only.
    """
    attention = (queries.float() @ keys.float().T * scale).softmax(-1)
    return smooth(attention, kernel).amax(1)


def ranking(scores: torch.Tensor) -> torch.Tensor:
    """Positions by falling score, ties to the earlier token: int64 [n, T]."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


def overlaps(order: torch.Tensor, base: torch.Tensor, count: int) -> torch.Tensor:
    """Share of each row's first `count` positions that are among the first `count` of `base`: float32 [n].

    order int64 [n, T], base int64 [T]: rankings.
    """
    member = torch.zeros(base.shape[0], dtype=torch.bool, device=base.device)
    member[base[:count]] = True
    return member[order[:, :count]].sum(1).float() / count  # exact: mean() on CUDA may fall short of 0.5 for a half


def drifted(shares: torch.Tensor, threshold: float) -> torch.Tensor:
    """Whether the median of `shares` is below `threshold`: bool scalar tensor."""
    return shares.median() < threshold


def satellite_positions(order: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best positions of a ranking [T], ascending: cut by score first, then sort."""
    return order[:count].sort().values


def released_positions(order: torch.Tensor, count: int, most: int, protected: int = 0) -> torch.Tensor:
    """What the released code takes: the EARLIEST `count` of the `most` best positions.

    It sorts the largest satellite's share by position before it cuts, so the others lose their best tokens; here
    not the first `protected` of the ranking, of which that code knows nothing.
    """
    earliest = order[protected:most].sort().values[: count - protected]
    return torch.cat([order[:protected], earliest]).sort().values

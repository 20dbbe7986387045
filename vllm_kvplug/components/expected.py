"""Attention that queries yet to come are expected to pay (2510.00636): pure functions over one layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + d/2) of x [..., d]; cos, sin [..., d/2] of the angles."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def query_statistics(
    queries: torch.Tensor, start: int, length: int, future: int, angles: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [query heads, d] and covariance [query heads, d, d] of queries at the `future` positions from `length` on.

    queries [n, query heads, d] after RoPE, n >= 1, the first at position `start`. Without their positions they are
    taken to be like those to come, which are then turned by the mean rotation of their positions.
    """
    angle = torch.tensor(angles, dtype=torch.float64, device=queries.device)

    def cos_sin(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(first, first + count, device=queries.device)[:, None] * angle
        return at.cos().float(), at.sin().float()

    cos, sin = cos_sin(start, queries.shape[0])
    plain = turn(queries.float(), cos[:, None], -sin[:, None])
    mean = plain.mean(0)
    centred = (plain - mean).transpose(0, 1)
    covariance = centred.transpose(1, 2) @ centred / queries.shape[0]
    cos, sin = (part.mean(0) for part in cos_sin(length, future))
    turned = turn(turn(covariance, cos, sin).transpose(1, 2), cos, sin)
    return turn(mean, cos, sin), turned


def expected_attention(mean: torch.Tensor, covariance: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax over keys of the log of a normally distributed query's expected weight, mean of the group: [KV heads, T].

    mean [query heads, d], covariance [query heads, d, d]; keys [KV heads, T, d] after RoPE.
    """
    group = mean.shape[0] // keys.shape[0]
    rows = []
    for head, own in enumerate(keys.float()):  # one at a time: a group's products with all keys are large
        of_head = slice(head * group, (head + 1) * group)
        spread = ((own @ covariance[of_head]) * own).sum(-1)  # [group, T]
        logits = scale * (mean[of_head] @ own.T) + scale**2 / 2 * spread
        rows.append(logits.softmax(-1).mean(0))
    return torch.stack(rows)

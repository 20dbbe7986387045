"""Which tokens a query attends to, and what must be fetched for that: pure functions of fixed shape, without a sync."""

from __future__ import annotations

import torch


def group_attention(scores: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The most that any query of a group attends to each token: softmax over tokens, then the maximum over the group.

    scores float32 [..., G, T], scaled; there: bool [..., T], the tokens that count. Returns [..., T], 0 for others.
    """
    weights = scores.masked_fill(~there.unsqueeze(-2), -torch.inf).softmax(-1).amax(-2)
    return weights.masked_fill(~there, 0)


def best(weights: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest in each row, best first, ties to the earlier: int64 [..., count]."""
    return torch.sort(weights, dim=-1, descending=True, stable=True).indices[..., :count]


def replace_misses(
    wanted: torch.Tensor, held: torch.Tensor, on: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which token each place holds next, so that those held and wanted stay where they are.

    wanted, held: int64 [..., k], distinct tokens below `tokens` in each row where `on`, bool [..., k], the same places
    in both. Returns what places hold next, int64 [..., k], and which of them change, bool [..., k]: the n-th
    wanted token that is not held goes to the n-th place whose token is not wanted.
    """
    shape = (*wanted.shape[:-1], tokens + 1)
    is_wanted, is_held = (
        torch.zeros(shape, dtype=torch.bool, device=wanted.device).scatter_(-1, torch.where(on, t, tokens), True)
        for t in (wanted, held)
    )
    new = on & ~is_held.gather(-1, torch.where(on, wanted, tokens))
    free = on & ~is_wanted.gather(-1, torch.where(on, held, tokens))
    news = torch.sort(new, dim=-1, descending=True, stable=True)
    places = torch.sort(free, dim=-1, descending=True, stable=True).indices
    after = held.scatter(-1, places, torch.where(news.values, wanted.gather(-1, news.indices), held.gather(-1, places)))
    return after, torch.zeros_like(new).scatter(-1, places, news.values)


def page_scores(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The most that the keys of each page could score, for any query of a group: float32 [..., pages].

    query [..., G, d]; low, high [..., pages, d], bounds of the keys. A query's best key within them takes the upper
    bound where the query is positive and the lower one elsewhere.
    """
    positive, negative = query.float().clamp_min(0), query.float().clamp_max(0)
    scores = positive @ high.float().transpose(-1, -2) + negative @ low.float().transpose(-1, -2)
    return scores.amax(-2)

"""Attention-based token scores: small pure functions over one layer."""

from __future__ import annotations

import torch


def prompt_attention(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a prompt's last queries over the whole prompt, in float32.

    queries [window, query heads, d], the last `window` positions; keys [KV heads, tokens, d], both after
    RoPE. Returns probabilities [KV heads, group, window, tokens]; query head q belongs to KV head q // group.
    """
    window, query_heads, dim = queries.shape
    heads, tokens, _ = keys.shape
    q = queries.float().view(window, heads, query_heads // heads, dim).permute(1, 2, 0, 3)
    logits = q @ keys.float().transpose(1, 2).unsqueeze(1) * scale
    query_pos = torch.arange(tokens - window, tokens, device=keys.device)
    future = torch.arange(tokens, device=keys.device) > query_pos[:, None]
    return logits.masked_fill_(future, -torch.inf).softmax(-1)


def smooth(scores: torch.Tensor, kernel: int) -> torch.Tensor:
    """Average pool of width `kernel`, stride 1, over the last dimension, zero-padded on both sides.

    kernel is odd. The divisor is always `kernel`, as in the papers' code.
    """
    if kernel == 1 or scores.shape[-1] == 0:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return torch.nn.functional.avg_pool1d(flat, kernel, stride=1, padding=kernel // 2).reshape(scores.shape)


QUERIES = 4
"""Queries whose attention to all stored tokens is in memory at a time."""


def stored_votes(
    queries: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor, scale: float, kernel: int
) -> torch.Tensor:
    """Attention that stored tokens get from later queries, float32 [KV heads, tokens].

    queries [window, query heads, d], keys [KV heads, tokens, d], both after RoPE; counts int64 [KV heads], how many of
    the keys each head has. The mean over queries of the maximum over a group's query heads, and then the maximum of
    `kernel` (odd) neighbours in the store.
    """
    by_head, widened = queries.float().unflatten(1, (len(keys), -1)), keys.float().transpose(1, 2).unsqueeze(1)
    missing = torch.arange(keys.shape[1], device=keys.device) >= counts[:, None, None, None]
    votes = torch.zeros(keys.shape[:2], device=keys.device)
    for some in by_head.split(QUERIES):
        logits = some.permute(1, 2, 0, 3) @ widened * scale  # [KV heads, group, queries, tokens]
        votes += logits.masked_fill_(missing, -torch.inf).softmax(-1).amax(1).sum(1)
    return torch.nn.functional.max_pool1d(votes / len(queries), kernel, stride=1, padding=kernel // 2)

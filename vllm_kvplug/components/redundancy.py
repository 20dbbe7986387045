"""How important stored tokens are to the newest queries, and how redundant: pure functions over one layer (R-KV)."""

from __future__ import annotations

import torch

SIMILAR = 0.5
"""Cosine above which a key says what another says."""

ROWS = 256
"""Keys that are compared with all others at a time."""


def importance(queries: torch.Tensor, keys: torch.Tensor, scale: float, kernel: int) -> torch.Tensor:
    """Attention that stored tokens get, float32 [KV heads, tokens].

    queries [window, query heads, d], keys [KV heads, tokens, d], both after RoPE. Each query's attention is that of its
    group's largest logits; then the mean over queries, and the maximum of `kernel` (odd) neighbours in the store.
    """
    by_head = queries.float().unflatten(1, (len(keys), -1)).permute(1, 2, 0, 3)  # [KV heads, group, window, d]
    logits = (by_head @ keys.float().transpose(1, 2).unsqueeze(1) * scale).amax(1)
    attention = logits.softmax(-1).mean(1)
    return torch.nn.functional.max_pool1d(attention, kernel, stride=1, padding=kernel // 2)


def redundancy(keys: torch.Tensor) -> torch.Tensor:
    """How much of what a token's key says other keys say too, float32 [KV heads, tokens]; a head's sum to 1.

    keys [KV heads, tokens, d]. The softmax over tokens of the mean cosine between their keys and all others. For every
    key, the latest of those that are like it does not count as redundant: of many alike the newest stays.
    """
    tokens = keys.shape[1]
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    index = torch.arange(tokens, device=keys.device)
    total = torch.zeros(keys.shape[:2], device=keys.device)
    for own in index.split(ROWS):
        cosine = unit[:, own] @ unit.transpose(1, 2)  # [KV heads, rows, tokens]
        cosine.masked_fill_(own[:, None] == index, 0)
        latest = torch.where(cosine > SIMILAR, index, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill_(latest == index, 0).sum(1)
    return (total / tokens).softmax(-1)

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

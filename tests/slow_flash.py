"""A slow stand-in for FlashAttention, for tests of what is asked of it on a machine without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def slow_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens_q: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What flash_attn_varlen_func says it computes, sequence by sequence."""
    if query.dtype == torch.float8_e4m3fn:
        of_sequence = given["q_descale"][:, 0].repeat_interleave(cu_seqlens_q.diff())
        query, key, value = query.float() * of_sequence[:, None, None], key.float(), value.float()
    out, lse = torch.zeros_like(query), torch.full((query.shape[1], len(query)), -torch.inf)
    for i, (first, last) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        if given["causal"]:
            k, v = key[first:last], value[first:last]
        else:
            pages, used = given["block_table"][i].long(), int(given["seqused_k"][i])
            k, v = (x[pages].flatten(0, 1)[:used] for x in (key, value))
        group = query.shape[1] // key.shape[-2]
        for head in range(query.shape[1]):
            scores = query[first:last, head] @ k[:, head // group].T * given["softmax_scale"]
            if given["causal"]:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
            if len(k):
                out[first:last, head] = scores.softmax(-1) @ v[:, head // group]
                lse[head, first:last] = scores.logsumexp(-1)
    return out, lse

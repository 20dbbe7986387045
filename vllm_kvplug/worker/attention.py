"""Attention of a prompt chunk over what its request stores and over itself (plain torch)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_kvplug.policies.base import Ring


def ring_positions(stored: int, length: int, ring: Ring, device: torch.device) -> torch.Tensor:
    """Positions of the `stored` tokens of a head after `length` tokens, in storage order, int64 [stored]."""
    index = torch.arange(stored, device=device)
    # Slot `index` holds the newest position that maps to it: the offset from the last one, modulo the window.
    turned = length - 1 - (length - 1 - index) % ring.window
    return torch.where(index < ring.sinks, index, turned)


def visible(query_pos: torch.Tensor, key_pos: torch.Tensor, ring: Ring | None) -> torch.Tensor:
    """Which keys a query may see: causal, and sinks + window if there is a ring. bool [queries, keys]."""
    distance = query_pos[:, None] - key_pos
    seen = distance >= 0
    if ring is not None:
        seen &= (key_pos < ring.sinks) | (distance < ring.window)
    return seen


@dataclass(frozen=True)
class Gated:
    """What a gate says of the tokens that a chunk may see beyond its local window.

    window: in tokens. positions: int64 [KV heads, s] of what is stored. stored, chunk: bool [KV heads, s] and
    [KV heads, t], whether it was admitted.
    """

    window: int
    positions: torch.Tensor
    stored: torch.Tensor
    chunk: torch.Tensor

    def mask(self, query_pos: torch.Tensor) -> torch.Tensor:
        """bool [KV heads, t, s + t]."""
        key_pos = torch.cat([self.positions, query_pos.expand(len(self.chunk), -1)], 1)[:, None]
        admitted = torch.cat([self.stored, self.chunk], 1)[:, None]
        distance = query_pos[:, None] - key_pos
        return (distance >= 0) & ((distance < self.window) | admitted)


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    start: int,
    ring: Ring | None,
    scale: float,
    gated: Gated | None = None,
) -> torch.Tensor:
    """Output of a prompt chunk whose first token is at position `start`.

    query [t, query heads, d]; key, value [t, KV heads, d]; stored: K and V of the request, each
    [KV heads, s, d], and how many of these each head has, int64 [KV heads]; None for the first chunk. gated: for
    heads that do not see all they could. Returns [t, query heads, d].
    """
    tokens = query.shape[0]
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    mask = None
    if stored is not None:
        keys, values = torch.cat([stored[0], keys], 1), torch.cat([stored[1], values], 1)
    if gated is not None:
        mask = gated.mask(torch.arange(start, start + tokens, device=query.device))
        mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 0)
    elif stored is not None or (ring is not None and tokens > ring.window):
        query_pos = torch.arange(start, start + tokens, device=query.device)
        key_pos = query_pos
        if stored is not None:
            count = stored[0].shape[1]
            if ring is None:  # all of them are before the chunk
                before = torch.zeros(count, dtype=torch.int64, device=query.device)
            else:
                before = ring_positions(count, start, ring, query.device)
            key_pos = torch.cat([before, query_pos])
        mask = visible(query_pos, key_pos, ring)
    if stored is not None and stored[2].min() < stored[0].shape[1]:
        there = torch.arange(keys.shape[1], device=query.device)
        missing = (there < stored[0].shape[1]) & (there >= stored[2][:, None])  # [KV heads, keys]
        assert mask is not None
        mask = mask & ~missing.repeat_interleave(query.shape[1] // key.shape[1], 0)[:, None]
    out = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)

"""Prompt chunks through vLLM's FlashAttention 3, where it runs: over themselves, and over what their heads store.

Heads have lengths and pages of their own, so for the stored part they are folded into the batch: (KV head, row) is a
sequence of G query heads and one KV head. The two parts are put together by their sums of exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvplug.placement.pool import MOST_E4M3
from vllm_kvplug.placement.tables import CHUNK, PageTables
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.shape import PAGE
from vllm_kvplug.worker.step import PrefillRow

MOST_DIM = 256


def runs_here(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Whether FlashAttention 3 takes such heads on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or dim % 8 or dim > MOST_DIM:
        return False
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    return is_fa_version_supported(3)


@dataclass(frozen=True)
class FlashPlan:
    """The prompt rows of a batch. Made once per step, for all layers.

    tokens: of all rows; they lie behind one another. longest: tokens of the longest row. before: most tokens that a
    row may store before this step, 0 if none does. slots: int64 [rows]. counts: int32 [rows], tokens. starts: int32
    [rows + 1], first tokens of the rows; folded: int32 [KV heads * rows + 1], of every (KV head, row).
    """

    tokens: slice
    longest: int
    before: int
    slots: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    folded: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[PrefillRow], kv_heads: int, device: torch.device) -> FlashPlan:
        first, last = rows[0].tokens.start, rows[-1].tokens.stop
        counts = [row.end - row.start for row in rows]
        starts = [row.tokens.start - first for row in rows] + [last - first]
        folded = [head * (last - first) + start for head in range(kv_heads) for start in starts[:-1]]
        folded.append(kv_heads * (last - first))
        lists = [[row.slot for row in rows], counts, starts, folded]
        flat = torch.tensor([n for values in lists for n in values], dtype=torch.int32)
        if device.type == "cuda":
            flat = flat.pin_memory().to(device, non_blocking=True)
        slots, *rest = flat.split([len(values) for values in lists])
        before = max(row.start for row in rows)
        return cls(slice(first, last), max(counts), before, slots.long(), *rest)


def flash_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    tables: PageTables,
    plan: FlashPlan,
    first_head: int,
    scale: float,
) -> None:
    """Attention of the planned rows over what their heads store and, causally, over themselves.

    output, query [tokens, Hq, D], key, value [tokens, H, D]; only the planned rows of `output` are written. pages
    [pages, 16, 2D], of the type of the others or e4m3 numbers. The tables count the rows' own tokens already.
    """
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    query, key, value, out = (x[plan.tokens] for x in (query, key, value, output))
    own, own_lse = _attend(
        query,
        key,
        value,
        cu_seqlens_q=plan.starts,
        cu_seqlens_k=plan.starts,
        max_seqlen_q=plan.longest,
        max_seqlen_k=plan.longest,
        softmax_scale=scale,
        causal=True,
    )
    if not plan.before:
        out.copy_(own)
        return
    tokens, kv_heads = key.shape[:2]
    earlier, earlier_lse = stored_attention(query, pages, tables, plan, first_head, kv_heads, scale)
    earlier = earlier.to(query.dtype)
    earlier = earlier.unflatten(0, (kv_heads, tokens)).transpose(0, 1).contiguous().flatten(1, 2)  # [tokens, Hq, D]
    earlier_lse = (
        earlier_lse.unflatten(1, (kv_heads, tokens)).transpose(0, 1).contiguous().flatten(0, 1)
    )  # [Hq, tokens]
    merge_attn_states(out, earlier, earlier_lse, own, own_lse)


def stored_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    tables: PageTables,
    plan: FlashPlan,
    first_head: int,
    kv_heads: int,
    scale: float,
    skip: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the planned rows over all that their heads store, but for the first `skip` tokens: full pages.

    query [planned tokens, Hq, D]; `plan.before` exceeds `skip`. Returns the output [H * tokens, G, D], KV heads
    outermost, and logarithms of sums of exponentials, float32 [G, H * tokens].
    """
    keys, values = pages.unsqueeze(2).chunk(2, -1)
    block_table, stored = _stored(tables, plan, first_head, kv_heads, skip)
    folded, scale_of_query = query.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(0, 1), None
    if pages.dtype == torch.float8_e4m3fn:  # the library wants queries of the type of pages
        factor = folded.abs().amax().float().clamp_min(1e-12) / MOST_E4M3
        folded = (folded / factor).to(pages.dtype)
        scale_of_query = factor.expand(len(plan.folded) - 1, 1)
    return _attend(
        folded,
        keys,
        values,
        cu_seqlens_q=plan.folded,
        max_seqlen_q=plan.longest,
        max_seqlen_k=plan.before - skip,
        seqused_k=stored,
        block_table=block_table,
        softmax_scale=scale,
        causal=False,
        q_descale=scale_of_query,
    )


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> Any:
    """Output [tokens, Hq, D] and logarithms of sums of exponentials [Hq, tokens]."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    given |= {"return_softmax_lse": True, "fa_version": 3}
    return flash_attn_varlen_func(query, key, value, **given)


def _stored(
    tables: PageTables, plan: FlashPlan, first_head: int, kv_heads: int, skip: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of before this step, behind `skip`: pages int32 [KV heads * rows, most pages], tokens int32 [KV heads * rows]."""
    heads, chunks = slice(first_head, first_head + kv_heads), ceil_div(plan.before, PAGE * CHUNK)
    listed = tables.directory[plan.slots, heads, :chunks].clamp_min(0)  # [rows, KV heads, chunks]
    pages = tables.chunks[listed.transpose(0, 1).long()].flatten(2)[..., skip // PAGE :]
    stored = tables.lengths[plan.slots, heads] - plan.counts[:, None] - skip
    return pages.flatten(0, 1).contiguous(), stored.clamp_min(0).T.flatten()

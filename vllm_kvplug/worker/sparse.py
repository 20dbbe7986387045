"""Prompt chunks behind a gate on admission, on CUDA.

FlashAttention 3, where it runs, attends to what lies behind the rings, which every query of a chunk sees: all but a
small part of a long prompt. Our kernel goes on from there with the rings and the chunks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvplug import ops
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.policies.base import LocalWindow
from vllm_kvplug.shape import PAGE
from vllm_kvplug.worker.flash import FlashPlan, stored_attention
from vllm_kvplug.worker.step import PrefillRow


@dataclass(frozen=True)
class SparsePlan:
    """The prompt rows of a batch. Made once per step, for all layers.

    tiles: of our kernel. beyond: what FlashAttention 3 is asked for, None where nothing is.
    """

    tiles: Any
    beyond: FlashPlan | None

    @classmethod
    def of(
        cls, rows: Sequence[PrefillRow], geometry: Geometry, local: LocalWindow, flash: bool, device: torch.device
    ) -> SparsePlan:
        """flash: whether FlashAttention 3 runs here. It reads whole pages, and e4m3 ones only with queries in e4m3."""
        g = geometry
        described = [(row.slot, row.tokens.start, row.end - row.start, row.start, row.stored) for row in rows]
        tiles = ops.sparse_prefill_plan(described, g.query_heads // g.kv_heads, g.head_dim, g.dtype, device)
        helps = local.tokens % PAGE == 0 and g.page_dtype == g.dtype and any(row.start > local.tokens for row in rows)
        return cls(tiles, FlashPlan.of(rows, g.kv_heads, device) if flash and helps else None)


def sparse_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    admitted: torch.Tensor,
    pages: torch.Tensor,
    tables: PageTables,
    plan: SparsePlan,
    first_head: int,
    scale: float,
    local: LocalWindow,
) -> None:
    """Attention of the planned rows over what their heads store and over themselves: causal, and admitted or near.

    output, query [tokens, Hq, D]; key, value [tokens, H, D]; admitted bool [tokens, H], what the gate says of the new
    tokens; pages [pages, 16, 2D]. Only the planned rows of `output` are written. The tables count the rows' own tokens
    already.
    """
    earlier, flash_plan = None, plan.beyond
    if flash_plan is not None:
        where = pages, tables, flash_plan, first_head, key.shape[1], scale, local.tokens
        earlier = (*stored_attention(query[flash_plan.tokens], *where), flash_plan.tokens.start)
    of_pages = pages, tables.directory, tables.chunks, tables.lengths, tables.positions, tables.scores
    seen = local.tokens, local.sinks, local.threshold
    ops.sparse_prefill(
        output, query, key, value, admitted, *of_pages, plan.tiles, first_head, scale, *seen, earlier=earlier
    )


def load_kernels(geometry: Geometry, local: LocalWindow, pages: torch.Tensor, tables: PageTables) -> None:
    """Run both variants of the kernel on a row of one token: it compiles at start-up. Nothing on the CPU."""
    g, device = geometry, tables.lengths.device
    if device.type != "cuda":
        return
    group = g.query_heads // g.kv_heads
    plan = ops.sparse_prefill_plan([(0, 0, 1, 0, 0)], group, g.head_dim, g.dtype, device)
    query = torch.zeros((1, g.query_heads, g.head_dim), dtype=g.dtype, device=device)
    new = torch.zeros((1, g.kv_heads, g.head_dim), dtype=g.dtype, device=device)
    admitted = torch.zeros((1, g.kv_heads), dtype=torch.bool, device=device)
    of_pages = pages, tables.directory, tables.chunks, tables.lengths, tables.positions, tables.scores
    seen = local.tokens, local.sinks, local.threshold
    for earlier in (None, (query.view(g.kv_heads, group, -1), torch.zeros((group, g.kv_heads), device=device), 0)):
        out = torch.empty_like(query)
        ops.sparse_prefill(out, query, new, new, admitted, *of_pages, plan, 0, g.scale, *seen, earlier=earlier)

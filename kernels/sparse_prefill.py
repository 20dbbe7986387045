"""Attention of prompt chunks that see a local window, and of older tokens those that a gate admitted (WG-KV, 2512.17452
section 3): vertical columns, different ones for every KV head, and a slash. What no query of a tile sees is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from vllm_kvplug.kernels.prefill_attention import CHUNK_PAGES, PAGE_TOKENS, PrefillPlan, _update

TILE_ROWS, WARPS = 128, 8
"""Queries times query heads of a KV head that a program attends for, in two warp groups: what fills a Hopper's tensor
cores and spills no registers."""


@triton.jit(do_not_specialize=["first_head", "earlier_first", "earlier_tokens", "column_stride"])
def _sparse_prefill_kernel(
    out,
    query,
    key,
    value,
    admitted,
    columns,
    ranks,
    pool,
    directory,
    chunks,
    lengths,
    positions,
    scores,
    blocks,
    rows,
    earlier,
    earlier_sums,
    first_head,
    earlier_first,
    earlier_tokens,
    scale,
    sinks,
    window,
    threshold,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    admitted_token_stride,
    admitted_head_stride,
    column_stride,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    lengths_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    CONTINUES: tl.constexpr,
):
    """A tile: QUERIES queries of one row and all GROUP query heads of one KV head, TILE >= QUERIES * GROUP.

    CONTINUES: what lies behind the ring was attended to already; its output and sums of exponentials are `earlier`.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    slot = tl.load(rows + 5 * row).to(tl.int64)
    batch_start = tl.load(rows + 5 * row + 1).to(tl.int64)  # of the chunk's first token
    tokens, start = tl.load(rows + 5 * row + 2), tl.load(rows + 5 * row + 3)

    m = tl.arange(0, TILE)
    d = tl.arange(0, D)
    n = tl.arange(0, KEYS)
    local = first + m // GROUP  # in the chunk
    real = (m < QUERIES * GROUP) & (local < tokens)
    at, query_head = batch_start + local, head * GROUP + m % GROUP
    q_at = query + (at * query_token_stride + query_head * query_head_stride)[:, None] + d[None, :]
    q = tl.load(q_at, mask=real[:, None], other=0.0)

    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, D], tl.float32)
    if CONTINUES:
        of_head = head.to(tl.int64) * earlier_tokens + at - earlier_first
        sums_at = earlier_sums + m % GROUP * (tl.num_programs(1) * earlier_tokens).to(tl.int64) + of_head
        peak = tl.load(sums_at, mask=real, other=float("-inf"))
        some = (peak > float("-inf")) & (peak < float("inf"))  # libraries differ in what they say of no keys at all
        peak = tl.where(some, peak, float("-inf"))
        total = tl.where(some, 1.0, 0.0)
        acc_at = earlier + (of_head * GROUP + m % GROUP)[:, None] * D + d[None, :]
        acc = tl.load(acc_at, mask=some[:, None], other=0.0).to(tl.float32)

    # What is stored: the ring, and behind it what was admitted.
    stored = tl.load(lengths + slot * lengths_stride + first_head + head) - tokens  # lengths count the chunk already
    if CONTINUES:
        stored = tl.minimum(stored, window)
    chunk_ids = directory + slot * directory_slot_stride + (first_head + head) * directory_head_stride
    for begin in range(0, stored, KEYS):
        index = begin + n
        kept = index < stored
        chunk = tl.load(chunk_ids + begin // (PAGE * CHUNK)).to(tl.int64)
        page = tl.load(chunks + chunk * chunk_stride + index // PAGE % CHUNK, mask=kept, other=0).to(tl.int64)
        token = page * PAGE + index % PAGE
        k_at = pool + token[:, None] * (2 * D) + d[None, :]
        k = tl.load(k_at, mask=kept[:, None], other=0.0).to(q.dtype)  # pages may be of e4m3 numbers
        v = tl.load(k_at + D, mask=kept[:, None], other=0.0).to(q.dtype)
        position = tl.load(positions + token, mask=kept, other=0)
        score = tl.load(scores + token, mask=kept, other=0.0)
        lasting = (score > threshold) | (position < sinks)
        near = start + local[:, None] - position[None, :] < window
        peak, total, acc = _update(q, k, v, (lasting[None, :] | near) & kept[None, :], scale, peak, total, acc)

    # Admitted tokens of the chunk that have left the window of all the tile's queries: they are seen by all of them.
    slash = tl.maximum(first - window + 1, 0)
    of_head = ranks + head.to(tl.int64) * column_stride + batch_start
    before, behind = tl.load(of_head), tl.load(of_head + slash)
    for begin in range(before, behind, KEYS):
        there = begin + n < behind
        column = tl.load(columns + head.to(tl.int64) * column_stride + begin + n, mask=there, other=0).to(tl.int64)
        k_at = key + column[:, None] * key_token_stride + head * key_head_stride + d[None, :]
        v_at = value + column[:, None] * value_token_stride + head * value_head_stride + d[None, :]
        k = tl.load(k_at, mask=there[:, None], other=0.0)
        v = tl.load(v_at, mask=there[:, None], other=0.0)
        peak, total, acc = _update(q, k, v, there[None, :] & real[:, None], scale, peak, total, acc)

    # The slash: from the window of the tile's first query to its last query.
    for begin in range(slash, tl.minimum(first + QUERIES, tokens), KEYS):
        index = begin + n
        there = index < tokens
        token = batch_start + index
        k_at = key + token[:, None] * key_token_stride + head * key_head_stride + d[None, :]
        v_at = value + token[:, None] * value_token_stride + head * value_head_stride + d[None, :]
        k = tl.load(k_at, mask=there[:, None], other=0.0)
        v = tl.load(v_at, mask=there[:, None], other=0.0)
        lasting = tl.load(
            admitted + token * admitted_token_stride + head * admitted_head_stride, mask=there, other=0
        ).to(tl.int1)
        distance = local[:, None] - index[None, :]
        seen = (distance >= 0) & ((distance < window) | lasting[None, :]) & there[None, :]
        peak, total, acc = _update(q, k, v, seen, scale, peak, total, acc)

    out_at = out + (at * out_token_stride + query_head * out_head_stride)[:, None] + d[None, :]
    result = acc / tl.where(real, total, 1.0)[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=real[:, None])


def tile(group: int, dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Queries of a program; their query heads taken together, rounded up to a power of two; keys of a step."""
    small = dim <= 128 and dtype.itemsize == 2
    rows = max(TILE_ROWS if small else TILE_ROWS // 2, triton.next_power_of_2(group))
    return rows // group, rows, 64 if small else 32


def sparse_prefill_plan(
    rows: Sequence[tuple[int, int, int, int, int]], group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> PrefillPlan:
    """For KV heads of `group` query heads each; rows as in `PrefillPlan`."""
    return PrefillPlan(rows, device, tile(group, dim, dtype)[0])


@dataclass(frozen=True)
class Columns:
    """The admitted tokens of a batch, for every KV head in order.

    columns: int32 [KV heads, tokens + 1], the tokens; behind them anything. ranks: as large, how many come before each.
    """

    columns: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, admitted: torch.Tensor) -> Columns:
        """admitted bool [tokens, KV heads]. No host synchronisation."""
        tokens, heads = admitted.shape
        ranks = torch.zeros((heads, tokens + 1), dtype=torch.int32, device=admitted.device)
        torch.cumsum(admitted.T, 1, dtype=torch.int32, out=ranks[:, 1:])
        place = torch.where(admitted.T, ranks[:, :-1], tokens)  # of those that are not admitted: the spare last one
        columns = torch.empty_like(ranks)
        numbers = torch.arange(tokens, dtype=torch.int32, device=admitted.device)
        columns.scatter_(1, place.long(), numbers.expand(heads, -1))
        return cls(columns, ranks)


def sparse_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    admitted: torch.Tensor,
    pool: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor,
    plan: PrefillPlan,
    first_head: int,
    scale: float,
    window: int,
    sinks: int,
    threshold: float,
    earlier: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> None:
    """As `vllm_kvplug.ops.sparse_prefill` says."""
    dim, kv_heads = query.shape[2], key.shape[1]
    if any(t.stride(2) != 1 for t in (out, query, key, value)):
        raise ValueError("sparse_prefill: the last dimension of its tensors must be contiguous")
    group = query.shape[1] // kv_heads
    queries, rows, keys = tile(group, dim, query.dtype)
    columns = Columns.of(admitted)
    before, sums, first = earlier or (out, scores, 0)  # never read
    _sparse_prefill_kernel[(plan.programs, kv_heads)](
        out,
        query,
        key,
        value,
        admitted,
        columns.columns,
        columns.ranks,
        pool,
        directory,
        chunks,
        lengths,
        positions,
        scores,
        plan.blocks,
        plan.rows,
        before,
        sums,
        first_head,
        first,
        len(before) // kv_heads,
        scale,
        sinks,
        window,
        threshold,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        admitted.stride(0),
        admitted.stride(1),
        columns.ranks.stride(0),
        directory.stride(0),
        directory.stride(1),
        chunks.stride(0),
        lengths.stride(0),
        GROUP=group,
        D=dim,
        QUERIES=queries,
        TILE=rows,
        KEYS=keys,
        PAGE=PAGE_TOKENS,
        CHUNK=CHUNK_PAGES,
        CONTINUES=earlier is not None,
        num_warps=WARPS,
    )

"""What the pages of decode rows promise their queries by the bounds of their keys: `components.selection.page_scores`
over every row and KV head of a layer, in one launch whose grid does not depend on how many pages there are. And bounds
that widen by a decode step's new keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm_kvplug.kernels.lines import parts_of, segment

CHUNK_PAGES = 64
PAGE_TOKENS = 16
BLOCK = 16
MOST = torch.finfo(torch.float32).max


@triton.jit(do_not_specialize=["first_head"])
def _page_scores_kernel(
    scores,
    ids,
    counts,
    left,
    query,
    bounds,
    directory,
    chunks,
    row_slot,
    lengths,
    attended,
    starts,
    first_head,
    query_row_stride,
    query_head_stride,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    lengths_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """A part of one head's pages: their scores and ids; how many it has, and how many tokens are left of the head."""
    item, part = tl.program_id(0), tl.program_id(1)
    row, kv_head = (item // HEADS).to(tl.int64), item % HEADS
    slot = tl.load(row_slot + row).to(tl.int64)
    if slot < 0:
        tl.store(counts + item, 0, mask=part == 0)
        tl.store(left + item, 0, mask=part == 0)
        return
    head = first_head + kv_head
    stored = tl.load(lengths + slot * lengths_stride + head)
    count = tl.cdiv(stored, PAGE)
    tl.store(counts + item, count, mask=part == 0)
    tl.store(left + item, stored - tl.maximum(count - tl.load(attended + row), 0) * PAGE, mask=part == 0)
    chunk_ids = directory + slot * directory_slot_stride + head * directory_head_stride
    begin = segment(starts, row, kv_head, HEADS, 1)
    d = tl.arange(0, D)
    share = tl.cdiv(count, PARTS * BLOCK) * BLOCK
    for first in range(part * share, tl.minimum((part + 1) * share, count), BLOCK):
        page = first + tl.arange(0, BLOCK)
        real = page < count
        chunk = tl.load(chunk_ids + page // CHUNK, mask=real, other=0).to(tl.int64)
        page_id = tl.load(chunks + chunk * chunk_stride + page % CHUNK, mask=real, other=0).to(tl.int64)
        at = bounds + page_id[:, None] * (2 * D) + d[None, :]
        low = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
        high = tl.load(at + D, mask=real[:, None], other=0.0).to(tl.float32)
        best = tl.full([BLOCK], -MOST, tl.float32)
        for g in tl.static_range(GROUP):
            q_at = query + row * query_row_stride + (kv_head * GROUP + g) * query_head_stride + d
            q = tl.load(q_at).to(tl.float32)[None, :]
            positive = tl.maximum(q, 0.0, propagate_nan=tl.PropagateNan.ALL)
            negative = tl.minimum(q, 0.0, propagate_nan=tl.PropagateNan.ALL)
            score = tl.sum(positive * high + negative * low, 1)
            best = tl.maximum(best, tl.where(score < MOST, score, MOST))  # what is no number counts as the most
        # The newest page is always attended to, and so are those of a local window.
        best = tl.where((page == count - 1) | (page < LOCAL), float("inf"), best)
        tl.store(scores + begin + page, best, mask=real)
        tl.store(ids + begin + page, page_id.to(tl.int32), mask=real)


def page_scores(
    scores: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    left: torch.Tensor,
    query: torch.Tensor,
    bounds: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    row_slot: torch.Tensor,
    lengths: torch.Tensor,
    attended: torch.Tensor,
    starts: torch.Tensor,
    first_head: int,
    local: int,
    longest: int,
) -> None:
    """Scores and ids of all pages of a layer, and how many tokens of a head are in those that its query attends to.

    scores float32 and ids int32: lines of unit 1 with `starts` (kernels/lines.py), written in place, as are counts, how
    many pages a head has, and left, how many tokens: int32 [rows, KV heads], 0 in padding rows. query
    [rows, query heads, D], the last dimension contiguous; bounds [pages, 2, D], lower and upper. directory, chunks,
    row_slot, lengths, first_head: as in `ops.decode_attention`; no head has more pages than its segment, or `longest`.
    attended: int32 [rows], how many of a head's pages are attended to, or all if it has no more. Scores are finite but
    for those of the newest page and the first `local` ones; NaN and infinite ones count as the largest number.
    """
    rows, heads = left.shape
    group, dim = query.shape[1] // heads, query.shape[2]
    parts = parts_of(rows * heads, longest, BLOCK)
    what = scores, ids, counts, left, query, bounds, directory, chunks, row_slot, lengths, attended, starts, first_head
    strides = *query.stride()[:2], *directory.stride()[:2], chunks.stride(0), lengths.stride(0)
    sizes = {"HEADS": heads, "GROUP": group, "D": dim, "PARTS": parts, "BLOCK": BLOCK}
    fixed = {"PAGE": PAGE_TOKENS, "CHUNK": CHUNK_PAGES, "MOST": MOST, "LOCAL": local}
    _page_scores_kernel[(rows * heads, parts)](*what, *strides, **sizes, **fixed)


# Places of a layer begin anywhere, and rows of them have any width: there is one variant for all.
@triton.jit(do_not_specialize=["place_stride", "key_stride"], do_not_specialize_on_alignment=["place", "key"])
def _widen_kernel(
    bounds, place, key, place_stride, key_stride, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):
    """The new key of one row and KV head, and the bounds of its page, which begin with the page's first key."""
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    at = tl.load(place + row * place_stride + head)
    if at < 0:
        return
    d = tl.arange(0, D)
    new = tl.load(key + row * key_stride + head * D + d).to(tl.float32)
    low_at = bounds + at // PAGE * (2 * D) + d
    begins = at % PAGE == 0
    low, high = tl.load(low_at).to(tl.float32), tl.load(low_at + D).to(tl.float32)
    low = tl.where(begins, new, tl.minimum(low, new, propagate_nan=tl.PropagateNan.ALL))
    high = tl.where(begins, new, tl.maximum(high, new, propagate_nan=tl.PropagateNan.ALL))
    tl.store(low_at, low.to(bounds.dtype.element_ty))
    tl.store(low_at + D, high.to(bounds.dtype.element_ty))


def widen(bounds: torch.Tensor, place: torch.Tensor, key: torch.Tensor) -> None:
    """`PageSelector.note` of tokens that lie in a page each: place int64 [rows, KV heads], -1 for none; key
    [rows, KV heads, D], the heads of a token side by side."""
    rows, heads, dim = key.shape
    strides = place.stride(0), key.stride(0)
    _widen_kernel[(rows * heads,)](bounds, place, key, *strides, HEADS=heads, D=dim, PAGE=PAGE_TOKENS, num_warps=1)

"""Around the choice of tokens for every row and KV head of a layer, in lines (kernels/lines.py): what is chosen by, and
what must be fetched for it. `components.selection.group_attention` and `replace_misses` are the same in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm_kvplug.kernels.lines import parts_of, segment

from vllm_kvplug.tiers.ledger import HOST_SLOT

PAGE_TOKENS = 16
CHUNK_PAGES = 64
BLOCK = 1024
PLACES = 2048
HELD, WANTED = 2.0, 3.0
"""Marks in place of weights, which are at most 1."""


@triton.jit
def _place(tables, chunks, index, on, chunk_stride, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """Token slots of the `index`-th stored tokens of a head, whose chunks are listed at `tables`; int64."""
    chunk = tl.load(tables + index // (PAGE * CHUNK), mask=on, other=0).to(tl.int64)
    page = tl.load(chunks + chunk * chunk_stride + index // PAGE % CHUNK, mask=on, other=0).to(tl.int64)
    return page * PAGE + index % PAGE


@triton.jit(do_not_specialize=["first_head"])
def _weights_kernel(
    weights,
    scores,
    sums,
    landmarks,
    excluded,
    starts,
    row_slot,
    directory,
    chunks,
    positions,
    first_head,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    SUMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The most that any query of a group attends to each token of a part of a head; -1 for tokens that stay anyway."""
    item, part = tl.program_id(0), tl.program_id(1)
    row, head = (item // HEADS).to(tl.int64), item % HEADS
    length = tl.load(landmarks + item)
    stride = (tl.load(starts + row + 1) - tl.load(starts + row)) * TOKENS
    mine = scores + segment(starts, row, head, HEADS, TOKENS * GROUP)
    begin = segment(starts, row, head, HEADS, TOKENS)
    share = tl.cdiv(length, PARTS * BLOCK) * BLOCK
    start, end = part * share, tl.minimum((part + 1) * share, length)
    if start >= end:
        return
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        best = tl.zeros([BLOCK], tl.float32)
        for g in tl.static_range(GROUP):
            of_part = sums + ((item * SUMS + tl.arange(0, SUMS)) * GROUP + g) * 2
            peaks, totals = tl.load(of_part), tl.load(of_part + 1)
            peak = tl.max(peaks, 0)
            peak = tl.where(peak == float("-inf"), 0.0, peak)
            total = tl.sum(totals * tl.exp(peaks - peak), 0)
            weight = tl.exp(tl.load(mine + g * stride + token, mask=token < end, other=0.0) - peak) / total
            best = tl.maximum(best, weight, propagate_nan=tl.PropagateNan.ALL)
        tl.store(weights + begin + token, best, mask=token < end)
    count = tl.load(excluded + item)
    if count > 0:
        tl.debug_barrier()
        slot = tl.load(row_slot + row).to(tl.int64)
        tables = directory + slot * directory_slot_stride + (first_head + head) * directory_head_stride
        for first in range(0, count, BLOCK):
            index = first + tl.arange(0, BLOCK)
            at = _place(tables, chunks, index, index < count, chunk_stride, PAGE, CHUNK)
            stays = tl.load(positions + at, mask=index < count, other=-1)
            tl.store(weights + begin + stays, tl.full([BLOCK], -1.0, tl.float32), mask=(stays >= start) & (stays < end))


@triton.jit(do_not_specialize=["first_head", "base", "host_slots_stride"])
def _misses_kernel(
    source,
    position,
    target,
    number,
    fresh,
    weights,
    chosen,
    landmarks,
    selected,
    stay,
    starts,
    list_starts,
    row_slot,
    host_slots,
    directory,
    chunks,
    positions,
    first_head,
    base,
    host_slots_stride,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    HOST_SLOT: tl.constexpr,
    HELD: tl.constexpr,
    WANTED: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One head: the n-th wanted token that it does not hold goes to the n-th place whose token is not wanted.

    The weights have served: by token they now say what is held, and then what is wanted.
    """
    item = tl.program_id(0)
    row, head = (item // HEADS).to(tl.int64), item % HEADS
    count, before = tl.load(selected + item), tl.load(stay + item)
    if count == 0:
        return
    known = tl.load(landmarks + item)
    slot = tl.load(row_slot + row).to(tl.int64)
    tables = directory + slot * directory_slot_stride + (first_head + head) * directory_head_stride
    marks = weights + segment(starts, row, head, HEADS, TOKENS)
    begin = segment(list_starts, row, head, HEADS, PAGE)
    for first in range(0, count, PLACES):
        place = first + tl.arange(0, PLACES)
        at = _place(tables, chunks, before + place, place < count, chunk_stride, PAGE, CHUNK)
        held = tl.load(positions + at, mask=place < count, other=-1) - base
        tl.store(marks + held, tl.full([PLACES], HELD, tl.float32), mask=(held >= 0) & (held < known))
    tl.debug_barrier()
    missing = 0
    for first in range(0, count, PLACES):
        index = first + tl.arange(0, PLACES)
        token = tl.load(chosen + begin + index, mask=index < count, other=0)
        is_new = (tl.load(marks + token, mask=index < count, other=HELD) != HELD).to(tl.int32)
        tl.store(fresh + begin + missing + tl.cumsum(is_new, 0) - 1, token, mask=is_new > 0)
        tl.store(marks + token, tl.full([PLACES], WANTED, tl.float32), mask=index < count)
        missing += tl.sum(is_new, 0)
    if missing == 0:
        return
    # All heads' fetches stand in one list, in whatever order they come.
    listed = tl.atomic_add(number, missing)
    tl.debug_barrier()
    done = 0
    for first in range(0, count, PLACES):
        place = first + tl.arange(0, PLACES)
        at = _place(tables, chunks, before + place, place < count, chunk_stride, PAGE, CHUNK)
        held = tl.load(positions + at, mask=place < count, other=-1) - base
        real = (held >= 0) & (held < known)
        is_free = (tl.load(marks + held, mask=real, other=0.0) != WANTED) & (place < count)
        index = done + tl.cumsum(is_free.to(tl.int32), 0) - 1
        takes = is_free & (index < missing)
        token = tl.load(fresh + begin + index, mask=takes, other=0)
        host = tl.load(host_slots + slot * host_slots_stride + token // HOST_SLOT, mask=takes, other=0)
        row_there = (host * ALL_HEADS + first_head + head) * HOST_SLOT + token % HOST_SLOT
        tl.store(source + listed + index, row_there, mask=takes)
        tl.store(position + listed + index, token.to(tl.int64), mask=takes)
        tl.store(target + listed + index, at, mask=takes)
        tl.store(positions + at, base + token, mask=takes)
        done += tl.sum(is_free.to(tl.int32), 0)


def group_weights(
    weights: torch.Tensor,
    scores: torch.Tensor,
    sums: torch.Tensor,
    landmarks: torch.Tensor,
    excluded: torch.Tensor,
    starts: torch.Tensor,
    row_slot: torch.Tensor,
    tables: object,
    heads: tuple[int, int, int],
    tokens: int,
    longest: int,
) -> None:
    """Write softmax over a head's landmarks and the maximum over its group of queries; -1 for tokens that stay.

    weights: float32, a line with `starts` and unit `tokens`. scores, sums, landmarks, starts, row_slot, heads: as in
    `landmark_scores`. tables: the `PageTables`; the first `excluded`, int32 [rows, KV heads] and contiguous, stored
    tokens of a head stay and have landmarks.
    """
    rows, (first_head, kv_heads, _) = len(row_slot), heads
    _, parts_of_sums, group, _ = sums.shape
    parts = parts_of(rows * kv_heads, longest, BLOCK)
    where = tables.directory, tables.chunks, tables.positions
    strides = *tables.directory.stride()[:2], tables.chunks.stride(0)
    sizes = {"HEADS": kv_heads, "GROUP": group, "TOKENS": tokens, "SUMS": parts_of_sums, "PARTS": parts}
    fixed = {"BLOCK": BLOCK, "PAGE": PAGE_TOKENS, "CHUNK": CHUNK_PAGES}
    what = weights, scores, sums, landmarks, excluded, starts, row_slot, *where, first_head
    _weights_kernel[(rows * kv_heads, parts)](*what, *strides, **sizes, **fixed)


def misses(
    fetch: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    fresh: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    numbers: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    list_starts: torch.Tensor,
    row_slot: torch.Tensor,
    host_slots: torch.Tensor,
    tables: object,
    heads: tuple[int, int, int],
    tokens: int,
    base: int = 0,
) -> None:
    """List what must be fetched so that heads hold the tokens that are `chosen`, and note that they do.

    fetch: row on the host, position and token slot of each, int64, and how many there are so far, int32 [1], to which
    these are added. fresh, chosen: int32, lines with `list_starts` and unit 16, of which the first is scratch. weights:
    as in `group_weights`; overwritten. numbers: landmarks, selected tokens, and how many stay before them in a head,
    int32 [rows, KV heads], contiguous. host_slots int64 [slots, n], of HOST_SLOT tokens of all heads. base: positions
    of tables are this more than tokens' numbers. The rest as in `group_weights`.
    """
    rows, (first_head, kv_heads, all_heads) = len(row_slot), heads
    where = tables.directory, tables.chunks, tables.positions
    strides = host_slots.stride(0), *tables.directory.stride()[:2], tables.chunks.stride(0)
    sizes = {"HEADS": kv_heads, "ALL_HEADS": all_heads, "TOKENS": tokens, "PLACES": PLACES, "HOST_SLOT": HOST_SLOT}
    fixed = {"HELD": HELD, "WANTED": WANTED, "PAGE": PAGE_TOKENS, "CHUNK": CHUNK_PAGES, "num_warps": 8}
    what = *fetch, fresh, weights, chosen, *numbers, starts, list_starts, row_slot, host_slots, *where, first_head, base
    _misses_kernel[(rows * kv_heads,)](*what, *strides, **sizes, **fixed)

"""Decode attention over head pages: one query token per row, each KV head with a length of its own.

Rows of very different length are cut into splits of equal size, planned on the device once per step for all layers:

    plan     splits of every (row, KV head) in every layer; which split each program of the grid works on
    attend   one program a split: partial softmax and weighted values; a head of one split is finished here
    reduce   heads of several splits: their partial results, weighed by their sums of exponentials

All grids depend on the number of rows alone and nothing is read back to the host, so a captured CUDA graph stays
right when lengths and tables change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAGE_TOKENS = 16
CHUNK_PAGES = 64
SHORTEST_SPLIT = 7  # log2 of tokens; both limits divide or are divided by a chunk of 1,024
LONGEST_SPLIT = 20
PROGRAMS_PER_SM = 8
INVERSE_BLOCK = 128
SPLITS_AT_ONCE = 16  # that are put together


# Sizes that differ by step or layer are not specialised on: each variant would be compiled when it first comes up.
@triton.jit(do_not_specialize=["rows"])
def _plan_kernel(
    starts,
    split_log2,
    row_slot,
    lengths,
    rows,
    capacity,
    starts_stride,
    lengths_stride,
    HEADS: tl.constexpr,
    ITEMS: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """One layer: the size of its splits, and the first split of every item = (row, KV head)."""
    layer = tl.program_id(0)
    item = tl.arange(0, ITEMS)
    row = item // HEADS
    slot = tl.load(row_slot + row, mask=row < rows, other=-1).to(tl.int64)
    head = layer * HEADS + item % HEADS
    length = tl.load(lengths + slot * lengths_stride + head, mask=slot >= 0, other=0)
    # The smallest power of two of which at most `capacity` full splits exist: partly filled ones come on top.
    total = tl.sum(length.to(tl.int64))
    log2 = SHORTEST
    for _ in range(SHORTEST, LONGEST):
        log2 += (total > (capacity << log2)).to(tl.int32)
    count = (length + (1 << log2) - 1) >> log2
    tl.store(starts + layer * starts_stride, 0)
    tl.store(starts + layer * starts_stride + 1 + item, tl.cumsum(count), mask=item < rows * HEADS)
    tl.store(split_log2 + layer, log2)


@triton.jit(do_not_specialize=["items"])
def _inverse_kernel(work, starts, items, work_stride, starts_stride, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The item that each split belongs to, -1 behind the last split: a binary search of all splits at once."""
    layer = tl.program_id(0)
    split = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        middle = low + (1 << (STEPS - 1 - step))
        start = tl.load(starts + layer * starts_stride + middle, mask=middle <= items, other=0)
        low = tl.where((middle <= items) & (start <= split), middle, low)
    tl.store(work + layer * work_stride + split, tl.where(low < items, low, -1), mask=split < work_stride)


@triton.jit(do_not_specialize=["first_head"])
def _attend_kernel(
    out,
    partial,
    sums,
    query,
    pool,
    directory,
    chunks,
    row_slot,
    lengths,
    work,
    starts,
    split_log2,
    first_head,
    scale,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    lengths_stride,
    work_stride,
    starts_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PAD: tl.constexpr,  # GROUP padded to what tl.dot takes
    D: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens per iteration
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program, layer = tl.program_id(0), first_head // HEADS
    item = tl.load(work + layer * work_stride + program)
    if item < 0:
        return
    start_of_item = starts + layer * starts_stride + item
    first_split, next_split = tl.load(start_of_item), tl.load(start_of_item + 1)
    row, kv_head = (item // HEADS).to(tl.int64), item % HEADS
    slot = tl.load(row_slot + row).to(tl.int64)
    head = first_head + kv_head
    log2 = tl.load(split_log2 + layer)
    begin = (program - first_split) << log2
    end = tl.minimum(tl.load(lengths + slot * lengths_stride + head), begin + (1 << log2))
    chunk_ids = directory + slot * directory_slot_stride + head * directory_head_stride

    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D)
    query_head = kv_head * GROUP + g
    in_group = (g < GROUP)[:, None]
    q_at = query + row * query_row_stride + query_head[:, None] * query_head_stride + d[None, :]
    q = tl.load(q_at, mask=in_group, other=0.0)

    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D], tl.float32)
    for start in range(begin, end, BLOCK):
        # A block lies in one chunk, since its size divides a chunk's.
        chunk = tl.load(chunk_ids + start // (PAGE * CHUNK)).to(tl.int64)
        token = start + tl.arange(0, BLOCK)
        stored = token < end
        page_id = tl.load(chunks + chunk * chunk_stride + token // PAGE % CHUNK, mask=stored, other=0).to(tl.int64)
        keys = pool + (page_id * PAGE + token % PAGE)[:, None] * (2 * D) + d[None, :]
        k = tl.load(keys, mask=stored[:, None], other=0.0).to(q.dtype)  # pages may be of e4m3 numbers
        v = tl.load(keys + D, mask=stored[:, None], other=0.0).to(q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(stored[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Where all scores are -inf so far, weights are 0 and not NaN: another split may hold finite ones.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - shift)
        weights = tl.exp(scores - shift[:, None])
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        # Reduced-precision values take weights of their own dtype. A second term holds what that rounding
        # loses, so the softmax stays a float32 one.
        high = weights.to(v.dtype)
        acc = tl.dot(high, v, acc, input_precision="ieee")
        if v.dtype != tl.float32:
            acc = tl.dot((weights - high.to(tl.float32)).to(v.dtype), v, acc)
        peak = new_peak

    if next_split - first_split == 1:
        out_at = out + row * out_row_stride + query_head[:, None] * out_head_stride + d[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_group)
    else:
        place = program * GROUP + g
        tl.store(partial + place[:, None] * D + d[None, :], acc, mask=in_group)
        tl.store(sums + 2 * place, peak, mask=g < GROUP)
        tl.store(sums + 2 * place + 1, total, mask=g < GROUP)


@triton.jit(do_not_specialize=["layer"])
def _reduce_kernel(
    out,
    partial,
    sums,
    starts,
    layer,
    starts_stride,
    out_row_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One query head of a row: its splits put together. Nothing stored gives zeros: that is a padding row."""
    row = tl.program_id(0).to(tl.int64)
    query_head = tl.program_id(1)
    start_of_item = starts + layer * starts_stride + row * HEADS + query_head // GROUP
    first, last = tl.load(start_of_item), tl.load(start_of_item + 1)
    if last - first == 1:
        return
    d = tl.arange(0, D)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for begin in range(first, last, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        place = split * GROUP + query_head % GROUP
        there = split < last
        peaks = tl.load(sums + 2 * place, mask=there, other=float("-inf"))
        totals = tl.load(sums + 2 * place + 1, mask=there, other=0.0)
        values = tl.load(partial + place[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, weights = tl.exp(peak - shift), tl.exp(peaks - shift)
        acc = acc * decay + tl.sum(values * weights[:, None], 0)
        total = total * decay + tl.sum(totals * weights, 0)
        peak = new_peak
    result = acc / tl.where(last == first, 1.0, total)
    tl.store(out + row * out_row_stride + query_head * out_head_stride + d, result.to(out.dtype.element_ty))


class DecodePlan:
    """Splits of up to `rows` rows in every layer, and room for their partial results, on one device.

    `update` after lengths have changed and before the step's attention; its tensors are persistent.
    """

    def __init__(self, rows: int, layers: int, kv_heads: int, query_heads: int, dim: int, device: torch.device):
        if dim not in (16, 32, 64, 128, 256):
            raise ValueError(f"decode_attention: head size must be a power of two from 16 to 256, got {dim}")
        self.layers, self.kv_heads, self.group = layers, kv_heads, query_heads // kv_heads
        self.capacity = self.programs_per_device(device)
        self._most, self._items = rows, triton.next_power_of_2(rows * kv_heads)
        programs = self.programs(rows)
        self.starts = torch.zeros((layers, rows * kv_heads + 1), dtype=torch.int32, device=device)
        self.split_log2 = torch.zeros(layers, dtype=torch.int32, device=device)
        self.work = torch.full((layers, programs), -1, dtype=torch.int32, device=device)
        self.partial = torch.empty((programs, self.group, dim), dtype=torch.float32, device=device)
        self.sums = torch.empty((programs, self.group, 2), dtype=torch.float32, device=device)

    @staticmethod
    def programs_per_device(device: torch.device) -> int:
        if device.type != "cuda":  # Triton's interpreter
            return PROGRAMS_PER_SM
        return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

    @property
    def nbytes(self) -> int:
        tensors = (self.starts, self.split_log2, self.work, self.partial, self.sums)
        return sum(tensor.nbytes for tensor in tensors)

    def programs(self, rows: int) -> int:
        """Splits that `rows` rows have at most: full ones, and a partly filled one of every head."""
        return self.capacity + rows * self.kv_heads

    def update(self, row_slot: torch.Tensor, lengths: torch.Tensor) -> None:
        """Plan all layers. row_slot int32 [rows], -1 for padding; lengths int32 [slots, layers * KV heads]."""
        rows = row_slot.shape[0]
        if not 0 < rows <= self._most:
            raise ValueError(f"decode_attention: the plan is for 1 to {self._most} rows, got {rows}")
        items = rows * self.kv_heads
        _plan_kernel[(self.layers,)](
            self.starts,
            self.split_log2,
            row_slot,
            lengths,
            rows,
            self.capacity,
            self.starts.stride(0),
            lengths.stride(0),
            HEADS=self.kv_heads,
            ITEMS=self._items,
            SHORTEST=SHORTEST_SPLIT,
            LONGEST=LONGEST_SPLIT,
        )
        _inverse_kernel[(self.layers, triton.cdiv(self.work.shape[1], INVERSE_BLOCK))](
            self.work,
            self.starts,
            items,
            self.work.stride(0),
            self.starts.stride(0),
            STEPS=self._items.bit_length(),
            BLOCK=INVERSE_BLOCK,
        )

    def attend(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        pool: torch.Tensor,
        directory: torch.Tensor,
        chunks: torch.Tensor,
        row_slot: torch.Tensor,
        lengths: torch.Tensor,
        first_head: int,
        scale: float,
    ) -> None:
        """One layer; see ops.decode_attention. Tables must be contiguous in their last dimension; ids are not checked.

        Raises ValueError for an `out` or `query` that is not contiguous in its last dimension.
        """
        rows, query_heads, dim = query.shape
        if out.stride(2) != 1 or query.stride(2) != 1:
            raise ValueError("decode_attention: the last dimension of out and query must be contiguous")
        shapes = {"HEADS": self.kv_heads, "GROUP": self.group, "D": dim}
        _attend_kernel[(self.programs(rows),)](
            out,
            self.partial,
            self.sums,
            query,
            pool,
            directory,
            chunks,
            row_slot,
            lengths,
            self.work,
            self.starts,
            self.split_log2,
            first_head,
            scale,
            out.stride(0),
            out.stride(1),
            query.stride(0),
            query.stride(1),
            directory.stride(0),
            directory.stride(1),
            chunks.stride(0),
            lengths.stride(0),
            self.work.stride(0),
            self.starts.stride(0),
            **shapes,
            GROUP_PAD=max(16, triton.next_power_of_2(self.group)),
            BLOCK=64 if dim <= 128 else 32,
            PAGE=PAGE_TOKENS,
            CHUNK=CHUNK_PAGES,
        )
        _reduce_kernel[(rows, query_heads)](
            out,
            self.partial,
            self.sums,
            self.starts,
            first_head // self.kv_heads,
            self.starts.stride(0),
            out.stride(0),
            out.stride(1),
            **shapes,
            SPLITS=SPLITS_AT_ONCE,
        )

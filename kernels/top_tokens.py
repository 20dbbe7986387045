"""The best of every head's tokens, in order of position, whatever their number: radix selection without a sort.

Scores of unlike many tokens lie in a line: with `starts` [rows + 1] and a unit, head h of row r has those from
(starts[r] * heads + h * (starts[r + 1] - starts[r])) * unit on, in order of position. Results lie in such a line too.

    count   four times, from the highest 8 bits of a score to the lowest: how many scores have which digit, of those
            that the digits above have left open; each part of a head counts its own
    write   what is above the lowest chosen score, and as many of those equal to it as are missing, earliest first

Every launch reads all scores once. Grids depend on the number of rows and on the longest context that an engine allows,
and numbers are read on the device: a captured CUDA graph stays right when they change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm_kvplug.kernels.lines import PROGRAMS, parts_of, segment

BLOCK = 2048
DIGITS = 256
LEVELS = 4
MOST_PARTS = 16
"""Every program adds up the counts of all parts of its head."""


@triton.jit
def _ordered(score):
    """Bits of float32 as uint32 that compare as the numbers do; NaN above all, and -0 equal to 0."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    ordered = tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)
    return tl.where(score != score, 0xFFFFFFFF, ordered)


@triton.jit
def _narrow(counts, state, above, item, items, LEVEL: tl.constexpr, PARTS: tl.constexpr, DIGITS: tl.constexpr):
    """What the digit of a level decides for an item: the digits so far and how many of those that have them are chosen.

    Also, of each part, how many scores are above them, and how many have them: [PARTS].
    """
    part, digit = tl.arange(0, PARTS), tl.arange(0, DIGITS)
    at = ((LEVEL * items + item) * PARTS + part)[:, None] * DIGITS + digit[None, :]
    found = tl.load(counts + at)
    all_parts = tl.sum(found, 0)
    prefix = tl.load(state + (LEVEL * items + item) * 2).to(tl.uint32, bitcast=True)
    missing = tl.load(state + (LEVEL * items + item) * 2 + 1)
    at_least = tl.cumsum(all_parts, 0, reverse=True)
    chosen = tl.sum((at_least >= missing).to(tl.int32), 0) - 1
    higher = digit > chosen
    left = missing - tl.sum(tl.where(higher, all_parts, 0), 0)
    over = tl.load(above + (LEVEL * items + item) * PARTS + part) + tl.sum(tl.where(higher[None, :], found, 0), 1)
    equal = tl.sum(tl.where((digit == chosen)[None, :], found, 0), 1)
    return (prefix << 8) | chosen.to(tl.uint32), left, over, equal


@triton.jit(do_not_specialize=["items"])
def _count_kernel(
    scores,
    starts,
    lengths,
    wanted,
    counts,
    state,
    above,
    items,
    lengths_row_stride,
    lengths_head_stride,
    wanted_row_stride,
    wanted_head_stride,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    LEVEL: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    item, part = tl.program_id(0), tl.program_id(1)
    row, head = item // HEADS, item % HEADS
    length = tl.load(lengths + row * lengths_row_stride + head * lengths_head_stride)
    count = tl.minimum(tl.load(wanted + row * wanted_row_stride + head * wanted_head_stride), length)
    if count <= 0:
        return
    if LEVEL == 3:
        prefix, missing, over = tl.full([], 0, tl.uint32), count, 0
    else:
        prefix, missing, of_parts, _ = _narrow(counts, state, above, item, items, LEVEL + 1, PARTS, DIGITS)
        over = tl.sum(tl.where(tl.arange(0, PARTS) == part, of_parts, 0), 0)
    mine = scores + segment(starts, row, head, HEADS, UNIT)
    share = tl.cdiv(length, PARTS * BLOCK) * BLOCK
    found = tl.zeros([DIGITS], tl.int32)
    for first in range(part * share, tl.minimum((part + 1) * share, length), BLOCK):
        token = first + tl.arange(0, BLOCK)
        real = token < length
        ordered = _ordered(tl.load(mine + token, mask=real, other=0.0))
        if LEVEL < 3:
            real = real & ((ordered >> (8 * LEVEL + 8)) == prefix)
        digit = tl.where(real, (ordered >> (8 * LEVEL)) & 255, 0).to(tl.int32)
        none = BLOCK - tl.sum(real.to(tl.int32), 0)
        found += tl.histogram(digit, DIGITS) - tl.where(tl.arange(0, DIGITS) == 0, none, 0)
    tl.store(counts + ((LEVEL * items + item) * PARTS + part) * DIGITS + tl.arange(0, DIGITS), found)
    tl.store(above + (LEVEL * items + item) * PARTS + part, over)
    tl.store(state + (LEVEL * items + item) * 2, prefix.to(tl.int32, bitcast=True), mask=part == 0)
    tl.store(state + (LEVEL * items + item) * 2 + 1, missing, mask=part == 0)


@triton.jit(do_not_specialize=["items"])
def _write_kernel(
    out,
    out_starts,
    scores,
    values,
    starts,
    lengths,
    wanted,
    counts,
    state,
    above,
    items,
    lengths_row_stride,
    lengths_head_stride,
    wanted_row_stride,
    wanted_head_stride,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    item, part = tl.program_id(0), tl.program_id(1)
    row, head = item // HEADS, item % HEADS
    length = tl.load(lengths + row * lengths_row_stride + head * lengths_head_stride)
    count = tl.minimum(tl.load(wanted + row * wanted_row_stride + head * wanted_head_stride), length)
    if count <= 0:
        return
    least, missing, over, equal = _narrow(counts, state, above, item, items, 0, PARTS, DIGITS)
    before = tl.arange(0, PARTS) < part
    ties = tl.sum(tl.where(before, equal, 0), 0)
    place = tl.sum(tl.where(before, over, 0), 0) + tl.minimum(ties, missing)
    begin = segment(starts, row, head, HEADS, UNIT)
    target = out + segment(out_starts, row, head, HEADS, OUT_UNIT)
    share = tl.cdiv(length, PARTS * BLOCK) * BLOCK
    for first in range(part * share, tl.minimum((part + 1) * share, length), BLOCK):
        token = first + tl.arange(0, BLOCK)
        real = token < length
        ordered = _ordered(tl.load(scores + begin + token, mask=real, other=0.0))
        ties_here = (real & (ordered == least)).to(tl.int32)
        early = ties + tl.cumsum(ties_here, 0) <= missing
        chosen = real & ((ordered > least) | ((ties_here > 0) & early))
        index = place + tl.cumsum(chosen.to(tl.int32), 0) - 1
        value = token if values is None else tl.load(values + begin + token, mask=chosen, other=0)
        tl.store(target + index, value, mask=chosen)
        ties += tl.sum(ties_here, 0)
        place += tl.sum(chosen.to(tl.int32), 0)


class TopTokens:
    """Room for the selection among up to `rows` rows of `heads` KV heads that have `longest` scores at most."""

    def __init__(self, rows: int, heads: int, longest: int, device: torch.device):
        self.heads, self.longest = heads, longest
        parts = max(rows * heads, PROGRAMS)
        self._counts = torch.empty((LEVELS, parts, DIGITS), dtype=torch.int32, device=device)
        self._above = torch.empty((LEVELS, parts), dtype=torch.int32, device=device)
        self._state = torch.empty((LEVELS, rows * heads, 2), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + self._above.nbytes + self._state.nbytes

    def choose(
        self,
        out: torch.Tensor,
        out_starts: torch.Tensor,
        out_unit: int,
        scores: torch.Tensor,
        starts: torch.Tensor,
        unit: int,
        lengths: torch.Tensor,
        wanted: torch.Tensor,
        values: torch.Tensor | None = None,
    ) -> None:
        """Write which scores of each head are its `wanted` largest, ascending; of equal ones the earlier.

        NaN counts as the largest. Nothing else of `out` is written, and of heads that have fewer than `wanted`, all is.

        out: int32, a line with `out_starts`, int32 [rows + 1], and `out_unit`. scores: float32, a line with `starts`,
        int32 [rows + 1], and `unit`. lengths, wanted: int32 [rows, heads], any strides. values: int32, a line like
        `scores`: written in place of the indices.
        """
        rows = len(lengths)
        items = rows * self.heads
        parts = parts_of(items, self.longest, BLOCK, MOST_PARTS)
        room = self._counts, self._state, self._above, items
        of_heads = *lengths.stride(), *wanted.stride()
        sizes = {"HEADS": self.heads, "UNIT": unit, "PARTS": parts, "BLOCK": BLOCK, "DIGITS": DIGITS, "num_warps": 8}
        for level in reversed(range(LEVELS)):
            _count_kernel[(items, parts)](scores, starts, lengths, wanted, *room, *of_heads, LEVEL=level, **sizes)
        what = out, out_starts, scores, values, starts, lengths, wanted
        _write_kernel[(items, parts)](*what, *room, *of_heads, OUT_UNIT=out_unit, **sizes)

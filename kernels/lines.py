"""Lines of segments: of every (row, KV head) as much as it has, one after another, so that rows of unlike length share
memory that holds what all of them can have together and not the longest in every row.

With `starts`, int32 [rows + 1], and a unit, the segment of head h of row r begins at element
(starts[r] * heads + h * (starts[r + 1] - starts[r])) * unit. Not all of it need be in use.
"""

from __future__ import annotations

import triton
import triton.language as tl

PROGRAMS = 1024
"""Enough for a GPU."""


@triton.jit
def segment(starts, row, head, HEADS: tl.constexpr, UNIT: tl.constexpr):
    """The first element of a head's segment, int64."""
    start = tl.load(starts + row).to(tl.int64)
    width = tl.load(starts + row + 1) - start
    return (start * HEADS + head * width) * UNIT


def parts_of(items: int, longest: int, block: int, most: int = PROGRAMS) -> int:
    """Into how many parts, a power of two, the work of each of `items` heads of up to `longest` elements is cut.

    Enough for a GPU, no more than the longest has blocks, at most `most`, a power of two too, and none where heads are
    many: empty programs cost time.
    """
    enough = 1 << (max(PROGRAMS // items, 1).bit_length() - 1)
    return min(triton.next_power_of_2(triton.cdiv(longest, block)), enough, most)

"""Places for one new token of every head of the decoding rows: `PageTables.append` in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAGE_TOKENS = 16
CHUNK_PAGES = 64


@triton.jit
def _append_kernel(
    place,
    slots,
    rows,
    last,
    lengths,
    directory,
    chunks,
    positions,
    free_chunks,
    num_free,
    taken,
    first_row,
    left,
    num_left,
    sinks,
    ring,
    place_stride,
    rows_stride,
    lengths_stride,
    directory_slot_stride,
    directory_head_stride,
    chunk_stride,
    left_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All heads of one row. Rows only share the stack of free chunks, from which they take by an atomic."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    h = tl.arange(0, HEADS_PAD)
    real = h < HEADS
    if slot < 0:
        tl.store(place + row * place_stride + h, tl.full([HEADS_PAD], -1, tl.int64), mask=real)
        return
    length = tl.load(lengths + slot * lengths_stride + h, mask=real, other=0)
    position = tl.load(last + row)
    growing = length < ring
    opens_page = real & growing & (length % PAGE == 0)
    entry = length // PAGE

    # The next pages of the request, by rank: of the blocks that shrinking left, then of its row's.
    before = tl.load(taken + slot)
    rank = before + tl.cumsum(opens_page.to(tl.int64)) - 1
    number = rank // HEADS
    count = tl.load(num_left + slot)
    listed = tl.load(left + slot * left_stride + number, mask=opens_page & (number < count), other=0)
    in_row = tl.load(first_row + slot) + number - count
    fresh = tl.load(rows + row * rows_stride + in_row, mask=opens_page & (number >= count), other=0)
    new_page = tl.where(number < count, listed, fresh).to(tl.int64) * HEADS + rank % HEADS
    tl.store(taken + slot, before + tl.sum(opens_page.to(tl.int64)))

    opens_chunk = opens_page & (entry % CHUNK == 0)
    opened = tl.sum(opens_chunk.to(tl.int64))
    top = tl.atomic_add(num_free, -opened)
    order = tl.cumsum(opens_chunk.to(tl.int64))
    new_chunk = tl.load(free_chunks + top - order, mask=opens_chunk, other=0)
    heads = directory + slot * directory_slot_stride + h * directory_head_stride
    tl.store(heads + entry // CHUNK, new_chunk, mask=opens_chunk)
    known = real & ~opens_chunk
    chunk = tl.where(opens_chunk, new_chunk, tl.load(heads + entry // CHUNK, mask=opens_page & known, other=0))
    tl.store(chunks + chunk.to(tl.int64) * chunk_stride + entry % CHUNK, new_page.to(tl.int32), mask=opens_page)

    victim = sinks + (position - sinks) % tl.maximum(ring - sinks, 1)
    index = tl.where(growing, length, victim)
    old_chunk = tl.load(heads + index // (PAGE * CHUNK), mask=real & ~opens_page, other=0).to(tl.int64)
    old_page = tl.load(chunks + old_chunk * chunk_stride + index // PAGE % CHUNK, mask=real & ~opens_page, other=0)
    found = tl.where(opens_page, new_page, old_page.to(tl.int64)) * PAGE + index % PAGE
    tl.store(place + row * place_stride + h, found, mask=real)
    tl.store(positions + found, tl.full([HEADS_PAD], 0, tl.int32) + position.to(tl.int32), mask=real)
    tl.store(lengths + slot * lengths_stride + h, length + growing.to(tl.int32), mask=real)


def append(
    tables: object,
    place: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    last: torch.Tensor,
    sinks: int,
    ring: int,
) -> None:
    """Write the token slots of a new token of every head to `place`, and lengthen the heads.

    tables: a `PageTables`, updated in place. place int64 [R, heads]; slots int64 [R], -1 for padding; rows int32
    [R, blocks]; last int64 [R], the new token's position. See `PageTables.append` for what the rest means.
    """
    heads = place.shape[1]
    if place.shape[0] == 0:
        return
    _append_kernel[(place.shape[0],)](
        place,
        slots,
        rows,
        last,
        tables.lengths,
        tables.directory,
        tables.chunks,
        tables.positions,
        tables._free_chunks,
        tables._num_free,
        tables._taken,
        tables._first_row,
        tables._left,
        tables._num_left,
        sinks,
        ring,
        place.stride(0),
        rows.stride(0),
        tables.lengths.stride(0),
        tables.directory.stride(0),
        tables.directory.stride(1),
        tables.chunks.stride(0),
        tables._left.stride(0),
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        PAGE=PAGE_TOKENS,
        CHUNK=CHUNK_PAGES,
    )

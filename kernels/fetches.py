"""What satellites fetch after a trigger: positions in order, where they go, and where they lie in the host tier."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_kvplug.tiers.ledger import HOST_SLOT

PAGE_TOKENS = 16
CHUNK_PAGES = 64
TOKENS = 2048


@triton.jit(
    do_not_specialize=["tokens", "satellites", "slots_stride"],
    do_not_specialize_on_alignment=["rank", "columns", "directory", "slots"],
)
def _fetches_kernel(
    positions,
    target,
    rows,
    rank,
    columns,
    directory,
    chunks,
    slots,
    tokens,
    satellites,
    directory_head_stride,
    chunk_stride,
    slots_stride,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    HOST_SLOT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One satellite: the prompt in order, of which it takes what its pivot ranks among the first."""
    satellite = tl.program_id(0)
    ranked = rank + tl.load(columns + satellite) * tokens
    pages = directory + tl.load(columns + satellites + satellite) * directory_head_stride
    count = tl.load(columns + 2 * satellites + satellite)
    begin = tl.load(columns + 3 * satellites + satellite)
    stored = slots + tl.load(columns + 4 * satellites + satellite) * slots_stride
    taken = 0
    for first in range(0, tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        chosen = tl.load(ranked + token, mask=token < tokens, other=tokens) < count
        index = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        # A request that has just ended has -1 for chunks; what is found for it is dropped.
        chunk = tl.maximum(tl.load(pages + index // (PAGE * CHUNK), mask=chosen, other=0), 0).to(tl.int64)
        page = tl.load(chunks + chunk * chunk_stride + index // PAGE % CHUNK, mask=chosen, other=0).to(tl.int64)
        slot = tl.load(stored + token // HOST_SLOT, mask=chosen, other=0)
        tl.store(positions + begin + index, token.to(tl.int64), mask=chosen)
        tl.store(target + begin + index, page * PAGE + index % PAGE, mask=chosen)
        tl.store(rows + begin + index, slot * HOST_SLOT + token % HOST_SLOT, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)


def fetches(
    rank: torch.Tensor,
    columns: torch.Tensor,
    directory: torch.Tensor,
    chunks: torch.Tensor,
    slots: torch.Tensor,
    total: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, token slots and rows of the host pool of what satellites fetch, int64 [total], one after another.

    rank int64 [pivots, T], by falling score; columns int64 [5, satellites]: the row of `rank`, the flat head, how many
    tokens of at most T, how many of earlier satellites, and the row of `slots`; directory int32 [heads, W] of the
    request; chunks int32 [C, 64]; slots int64 [n, host slots].
    """
    found = [torch.empty(total, dtype=torch.int64, device=rank.device) for _ in range(3)]
    strides = directory.stride(0), chunks.stride(0), slots.stride(0)
    sizes = {"PAGE": PAGE_TOKENS, "CHUNK": CHUNK_PAGES, "HOST_SLOT": HOST_SLOT, "TOKENS": TOKENS}
    satellites = columns.shape[1]
    where = rank, columns, directory, chunks, slots, rank.shape[1], satellites
    if satellites:
        _fetches_kernel[(satellites,)](*found, *where, *strides, **sizes, num_warps=8)
    return found[0], found[1], found[2]

"""Invariants of the page tables, checked on the host: for tests and debugging, never in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_kvplug.placement.tables import CHUNK, PageTables
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.shape import PAGE


def head_pages(tables: PageTables, slot: int, head: int) -> list[int]:
    """Page ids of one head of a live request, in logical order."""
    count = ceil_div(int(tables.lengths[slot, head]), PAGE)
    chunks = tables.directory[slot, head, : ceil_div(count, CHUNK)].tolist()
    return [int(tables.chunks[chunks[j // CHUNK], j % CHUNK]) for j in range(count)]


def kept_positions(tables: PageTables, slot: int) -> list[list[int]]:
    """Sequence positions that each head of a live request stores, ascending, one list per head."""
    result = []
    for head in range(tables.sizes.heads):
        length = int(tables.lengths[slot, head])
        pages = torch.tensor(head_pages(tables, slot, head), dtype=torch.int64)
        flat = tables.positions.cpu()[pages].flatten()[:length]
        result.append(sorted(flat.tolist()))
    return result


def check_integrity(tables: PageTables, rows: Mapping[int, Sequence[int]]) -> None:
    """Assert that live requests share no page, use only their blocks, and that no chunk leaks.

    rows: for each live slot the block ids it owns (0, the null block, for entries given back).
    """
    sizes = tables.sizes
    owner: dict[int, tuple[int, int]] = {}
    chunks_in_use: set[int] = set()
    for slot, blocks in rows.items():
        own = {b for b in blocks if b != 0}
        for head in range(sizes.heads):
            length = int(tables.lengths[slot, head])
            assert length >= 1, f"slot {slot} head {head} is empty"
            for page in head_pages(tables, slot, head):
                assert page // sizes.heads in own, f"slot {slot} head {head}: page {page} is in a foreign block"
                assert page not in owner, f"page {page} belongs to {owner[page]} and to {(slot, head)}"
                owner[page] = (slot, head)
            listed = tables.directory[slot, head, : sizes.chunks_per_head]
            used = [c for c in listed.tolist() if c >= 0]
            assert len(used) == ceil_div(ceil_div(length, PAGE), CHUNK), f"slot {slot} head {head}: chunk count"
            assert chunks_in_use.isdisjoint(used), f"slot {slot} head {head}: shared chunk"
            chunks_in_use.update(used)
        for head, positions in enumerate(kept_positions(tables, slot)):
            assert len(set(positions)) == len(positions), f"slot {slot} head {head}: a position twice"
            assert positions[0] >= 0, f"slot {slot} head {head}: unwritten position"
    free = tables._free_chunks[: int(tables._num_free)].tolist()
    assert len(set(free)) == len(free) and chunks_in_use.isdisjoint(free), "chunk free list is corrupt"
    assert len(free) + len(chunks_in_use) == sizes.chunks, "a chunk leaked"
    dead = [s for s in range(sizes.slots) if s not in rows]
    assert not tables.lengths[dead].any(), "a dead slot has tokens"

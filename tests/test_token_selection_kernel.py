"""Selection from the host as CUDA does it, against components in plain torch: what is scored, chosen and listed."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import DEVICE, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug import memory
from vllm_kvplug.components.landmarks import FORMATS, LandmarkPages
from vllm_kvplug.components.selection import best, group_attention
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.policies.selecting import SelectingPolicy
from vllm_kvplug.selection import Layout
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.ledger import HOST_SLOT
from vllm_kvplug.worker.selection_lines import SelectedLines

ROWS, BLOCKS, LONGEST = 6, 60, 1000
LAYER = 1


class Rows:
    """Requests that select, in slots 0, 2, 4 ...: landmarks in pages, held tokens, and where all that lies.

    ragged: heads have unlike numbers of landmarks and of selected tokens, up to none; layouts have the largest.
    counts: of each row and head, landmarks and selected tokens.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        group: int,
        layouts: list[Layout | None],
        device: str,
        base: int = 0,
        ragged: bool = False,
    ):
        torch.manual_seed(dim)
        self.layouts, self.device = layouts, device
        self.counts: dict[tuple[int, int], tuple[int, int]] = {}
        self.geometry = g = Geometry(
            2, 3, 0, 3 * group, dim, torch.float32, dim**-0.5, 2 * ROWS, LONGEST, torch.float32
        )
        self.pool = PagePool(torch.full((BLOCKS * 6, 16, 2 * dim), torch.nan))
        self.tables = PageTables(TableSizes(2 * ROWS, 6, LONGEST, BLOCKS), "cpu")
        self.pages = LandmarkPages(name, dim, 16 * 2 * dim * 4)
        self.blocks = torch.zeros(2 * ROWS + 1, 8, dtype=torch.int64)
        self.host_slots = torch.randint(1000, (2 * ROWS + 1, LONGEST // HOST_SLOT + 1))
        free = torch.randperm(BLOCKS - 1) + 1
        for i, layout in enumerate(layouts):
            if layout is None:
                continue
            row, free = free[: layout.token_blocks], free[layout.token_blocks :]
            self.tables.extend(2 * i, row.int()[None], 0, layout.kept, 0, 1 << 30)
            stays = torch.tensor([t for a, b in layout.stays for t in range(a, b)])
            for head in range(6):
                landmarks = layout.landmarks * (5 - head) // 5 if ragged else layout.landmarks
                open_to = torch.ones(landmarks, dtype=torch.bool)
                open_to[stays[stays < landmarks]] = False
                selected = min(layout.selected, int(open_to.sum()))
                self.counts[i, head] = landmarks, selected
                held = open_to.nonzero()[:, 0][torch.randperm(int(open_to.sum()))[:selected]]
                where = self.tables.locate(2 * i, head, torch.arange(layout.stay + selected))
                self.tables.set_positions(where, torch.cat([stays, base + held]))
            row, free = free[: layout.landmark_blocks], free[layout.landmark_blocks :]
            self.blocks[2 * i, : len(row)] = row
            encoded = self.pages.encode(torch.randn(6, layout.landmarks, dim))
            for head in range(6):
                self.pool.bytes[row * 6 + head] = encoded[head]
        self.query = torch.randn(len(layouts) + 1, 3 * group, dim)
        self.slots = torch.tensor([*range(0, 2 * len(layouts), 2), -1], dtype=torch.int32)
        self.name, self.g = name, g

    def numbers(self) -> torch.Tensor:
        """Of the rows, and of one for padding: what stays, selected tokens, landmarks, and excluded ones."""
        numbers = torch.zeros(len(self.slots), 6, 4, dtype=torch.int64)
        for (i, head), (landmarks, selected) in self.counts.items():
            layout = self.layouts[i]
            excluded = sum(max(min(end, landmarks) - start, 0) for start, end in layout.stays)
            numbers[i, head] = torch.tensor([layout.stay, selected, landmarks, excluded])
        return numbers

    def lines(self) -> SelectedLines:
        """On the device, with everything in it poisoned."""
        pool = PagePool(self.pool.pages.to(self.device))
        for name in ("directory", "chunks", "lengths", "positions"):
            setattr(self.tables, name, getattr(self.tables, name).to(self.device))
        lines = SelectedLines(self.name, self.pages, self.geometry, pool, self.tables, ROWS)
        for room in (lines._scores, lines._weights, lines._sums, lines._turned):
            room.fill_(torch.nan)
        for room in (lines._chosen, lines._fresh, lines.fetches, lines.count):
            room.fill_(-7)
        lines.lay_out(self.layouts, self.numbers().to(self.device))
        return lines

    def wanted(self, row: int, layout: Layout) -> tuple[torch.Tensor, list[list[int]]]:
        """Weights [3, landmarks], 0 where a head has none, and the chosen tokens, of the layer."""
        heads = torch.arange(3 * LAYER, 3 * LAYER + 3)
        page = self.blocks[2 * row, : layout.landmark_blocks] * 6 + heads[:, None]
        query = self.query[row].unflatten(0, (3, -1))
        scores = self.pages.score(query[None], self.pool.bytes, page[None])[0] * self.g.scale
        scores = scores[..., : layout.landmarks]
        counts = torch.tensor([self.counts[row, int(head)] for head in heads])
        weights = group_attention(scores, torch.arange(layout.landmarks) < counts[:, :1])
        ranks = torch.where(torch.arange(layout.landmarks) < counts[:, :1], weights, -2)
        for start, end in layout.stays:
            ranks[:, start : min(end, layout.landmarks)] -= 1
        chosen = best(ranks, layout.selected)
        return weights, [head[:count].tolist() for head, (_, count) in zip(chosen, counts.tolist(), strict=True)]


def layout_of(tokens: int, stays: tuple[tuple[int, int], ...], selected: int, per_page: int) -> Layout:
    local = stays[-1][1] - stays[-1][0]
    stay = sum(end - start for start, end in stays)
    landmarks = tokens - local
    return Layout(stays, selected, landmarks, -(-(stay + selected) // 16), -(-landmarks // per_page))


def held_by(rows: Rows, row: int, head: int, base: int) -> tuple[list[int], list[int]]:
    """Numbers of the selected tokens that a head holds, and the token slots where."""
    tables, layout = rows.tables, rows.layouts[row]
    selected = rows.counts[row, head][1]
    where = tables.locate(2 * row, head, torch.arange(selected, device=tables.lengths.device) + layout.stay)
    return (tables.positions.view(-1)[where] - base).tolist(), where.tolist()


@runs_kernel
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim, group, base", [(32, 1, 0), (64, 3, 0), (128, 4, 0), (64, 2, 5000)])
@pytest.mark.parametrize("ragged", [False, True], ids=["alike", "ragged"])
def test_every_row_gets_what_it_wants(name: str, dim: int, group: int, base: int, ragged: bool) -> None:
    """Rows of unlike length, one that does not select and one that is padding; whoever held a token keeps its place."""
    per_page = LandmarkPages(name, dim, 16 * 2 * dim * 4).tokens
    layouts = [
        layout_of(900, ((0, 3), (20, 25), (836, 900)), 100, per_page),
        None,
        layout_of(130, ((66, 130),), 16, per_page),
        layout_of(400, ((0, 40), (390, 400)), 350, per_page),
    ]
    rows = Rows(name, dim, group, layouts, DEVICE, base, ragged)
    expected = {i: rows.wanted(i, layout) for i, layout in enumerate(layouts) if layout}
    before = {(i, h): held_by(rows, i, 3 + h, base)[0] for i in expected for h in range(3)}
    other_layer = [held_by(rows, 0, head, base) for head in range(3)]
    lines = rows.lines()
    given = (t.to(DEVICE) for t in (rows.slots, rows.query, rows.blocks, rows.host_slots))
    slots, query, blocks, host_slots = given
    lines.choose(slots, LAYER, query, blocks, host_slots, base)

    fetched = {int(t): (int(s), int(p)) for s, p, t in lines.fetches[:, : int(lines.count)].T.cpu()}
    assert len(fetched) == int(lines.count), "a place is fetched for twice"
    assert (lines.fetches[:, int(lines.count) :] == -7).all()
    for i, (weights, wanted) in expected.items():
        for h in range(3):
            now, places = held_by(rows, i, 3 + h, base)
            assert_same_up_to_ties(weights[h], now, wanted[h])
            for place, new, old in zip(places, now, before[i, h], strict=True):
                if old in now:
                    assert new == old and place not in fetched
                else:
                    source = (int(rows.host_slots[2 * i, new // HOST_SLOT]) * 6 + 3 + h) * HOST_SLOT + new % HOST_SLOT
                    assert fetched.pop(place) == (source, new)
    assert not fetched
    assert other_layer == [held_by(rows, 0, head, base) for head in range(3)]


def assert_same_up_to_ties(weights: torch.Tensor, found: list[int], wanted: list[int]) -> None:
    swapped = sorted(set(found) ^ set(wanted))
    assert len(set(found)) == len(wanted) == len(found)
    assert not swapped or weights[swapped].max() - weights[swapped].min() <= 1e-5 * weights[swapped].max()


@pytest.mark.parametrize("rows", [2, 700])
def test_lines_take_what_is_charged(rows: int) -> None:
    """Of a pool so large, or rows so many, that the one or the other bounds them."""
    pytest.importorskip("triton")
    shape = ModelShape(2, 3, 6, 64, rotary=(1.0,) * 32, page_itemsize=4)
    policy = make_policy("yakv", {}, shape)
    geometry = Geometry.of_rank(shape, 0, torch.float32, rows, 4000)
    tables, pool = PageTables(TableSizes(1, 6, 4000, 300), "cpu"), PagePool(torch.zeros(300 * 6, 16, 128))
    assert isinstance(policy, SelectingPolicy)
    lines = SelectedLines("higgs2", policy.landmark_pages, geometry, pool, tables, rows)
    top = lines._top
    room = [*vars(lines).values(), top._counts, top._above, top._state]
    taken = sum(t.nbytes for t in room if isinstance(t, torch.Tensor))
    fixed, per_block = memory.line_bytes(policy, geometry, rows), memory.line_bytes_per_block(policy, geometry)
    assert memory.radix_bytes(geometry, rows) == top.nbytes
    assert taken <= fixed + 300 * per_block and (rows == 2 or taken == fixed + 300 * per_block)
    charged = memory.charges(policy, geometry, 64, 1, rows), memory.charges(policy, geometry, 64, 1)
    assert charged[0].per_block - charged[1].per_block == per_block
    assert charged[0].tables - charged[1].tables == fixed


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)

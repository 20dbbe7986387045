"""Random lives of several requests: a toy scheduler drives the page tables as vLLM's would, by page plan.

The model under test is checked against plain dictionaries after every step: what each (request, head)
stores, which blocks own it, and that nothing leaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kvplug.cuts import Cuts
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.integrity import check_integrity, kept_positions
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.plan import Kept, PagePlan, Plan, SharedPlan, ceil_div
from vllm_kvplug.policies.base import Ring
from vllm_kvplug.shape import PAGE, ModelShape
from vllm_kvplug.worker.cuts import Cutter

UNBOUNDED = 1 << 30
SLOTS = 4
MAX_TOKENS = 1200  # more than the 1,024 of one chunk
BLOCKS = 240

Stored = dict[int, tuple[int, int]]  # position -> (K, V)


@dataclass
class Request:
    """slot: in the tables. end: tokens after which the prompt is complete. tokens: computed so far.
    row: block ids, 0 where given back. heads: what each head must store. scores: by head and position. vacated:
    entries of the row that the worker has left and the scheduler has not given back yet."""

    slot: int
    end: int
    heads: list[Stored]
    tokens: int = 0
    row: list[int] = field(default_factory=list)
    scores: list[dict[int, float]] = field(default_factory=list)
    vacated: list[int] = field(default_factory=list)

    @property
    def decoding(self) -> bool:
        return self.tokens >= self.end


class World:
    """Block pool, page tables, memory and live requests of one tensor-parallel rank."""

    def __init__(self, shape: ModelShape, rank: int, plan: Plan, ring: Ring | None, promotes: bool):
        self.plan, self.ring, self.promotes = plan, ring, promotes
        self.ring_tokens, self.sinks = (ring.tokens, ring.sinks) if ring else (UNBOUNDED, 0)
        self.local = [(layer, head) for layer in range(shape.layers) for head in shape.rank_heads(rank)]
        self.heads = plan.heads_per_rank
        assert len(self.local) == self.heads
        self.shared = isinstance(plan, SharedPlan)
        self.tables = PageTables(TableSizes(SLOTS, self.heads, MAX_TOKENS, BLOCKS, self.shared), "cpu")
        self.pool = PagePool(torch.full((BLOCKS * self.heads, PAGE, 2), -1, dtype=torch.int64))
        geometry = Geometry.of_rank(shape, rank, torch.float32, SLOTS, MAX_TOKENS)
        self.cutter = Cutter(geometry, self.pool, self.tables)
        self.free_blocks = list(range(1, BLOCKS))  # 0 is the null block
        self.free_slots = list(range(SLOTS))
        self.live: list[Request] = []
        self.written = 0

    # ---- the scheduler's side

    def admit(self, end: int) -> None:
        stored, scores = ([{} for _ in range(self.heads)] for _ in range(2))
        self.live.append(Request(self.free_slots.pop(), end, stored, scores=scores))

    def allocate(self, request: Request, tokens: int) -> bool:
        """Blocks for `tokens` more, appended to the row; False if there are too few."""
        missing = self.plan.row_entries(request.end, request.tokens + tokens) - len(request.row)
        if missing > len(self.free_blocks):
            return False
        for _ in range(missing):
            request.row.append(self.free_blocks.pop())
        return True

    def give_back(self, request: Request) -> None:
        """What the worker vacated."""
        for entry in request.vacated:
            self.free_blocks.append(request.row[entry])
            request.row[entry] = 0
        request.vacated = []

    def end(self, request: Request) -> None:
        self.tables.free([request.slot])
        self.free_blocks += [block for block in request.row if block]
        self.free_slots.append(request.slot)
        self.live.remove(request)

    # ---- the worker's side

    def rows(self, requests: list[Request | None]) -> torch.Tensor:
        """Block table of a batch, as wide as vLLM's; None is a padding row."""
        rows = torch.zeros((len(requests), ceil_div(MAX_TOKENS, PAGE) + 1), dtype=torch.int32)
        for i, request in enumerate(requests):
            if request is not None:
                rows[i, : len(request.row)] = torch.tensor(request.row, dtype=torch.int32)
        return rows

    def run_decodes(self, requests: list[Request | None], keeps: Callable[[], list[bool]]) -> None:
        """One new token for each request in one launch; `keeps()` says which heads promote their victim."""
        slots = torch.tensor([-1 if r is None else r.slot for r in requests])
        positions = torch.tensor([-1 if r is None else r.tokens for r in requests])
        if self.promotes:
            self.run_promotions(requests, slots, positions, keeps)
        places = self.tables.append(slots, self.rows(requests), positions, self.sinks, self.ring_tokens)
        for request, place in zip(requests, places, strict=True):
            if request is None:
                assert (place == -1).all()
            else:
                self.write(request, request.tokens, place[None])
                request.tokens += 1
                self.after(request)

    def run_promotions(self, requests, slots: torch.Tensor, positions: torch.Tensor, keeps) -> None:
        assert self.ring is not None
        window = self.ring.window
        keep = torch.zeros((len(requests), self.heads), dtype=torch.bool)
        for i, request in enumerate(requests):
            if request is None or request.tokens < self.ring_tokens:
                continue
            keep[i] = torch.tensor(keeps())
            for head, kept in enumerate(keep[i].tolist()):
                if not kept:
                    del request.heads[head][request.tokens - window]
        victims = self.sinks + (positions - self.sinks) % window
        source, target = self.tables.promote(slots, self.rows(requests), victims, keep)
        assert torch.equal(source >= 0, keep) and torch.equal(target >= 0, keep)
        self.pool.copy_tokens(source[keep], target[keep])

    def run_chunk(self, request: Request, tokens: int) -> None:
        start, end = request.tokens, request.tokens + tokens
        place = self.tables.extend(request.slot, self.rows([request]), start, end, self.sinks, self.ring_tokens)
        assert place.shape == (tokens, self.heads)
        self.write(request, start, place)
        request.tokens = end
        self.after(request)

    def write(self, request: Request, start: int, place: torch.Tensor) -> None:
        """Unique K and V at `place` [tokens, heads]; into the model whatever the policy says stays."""
        values = torch.arange(self.written, self.written + place.numel()).view_as(place)
        self.written += place.numel()
        if self.shared:
            scores = torch.rand(place.shape, generator=torch.Generator().manual_seed(self.written))
            scores = (scores * 50).round()  # with ties
            self.tables.set_scores(place, scores)
            for head, known in enumerate(request.scores):
                known.update(enumerate(scores[:, head].tolist(), start))
        on = place >= 0
        self.pool.pages.view(-1, 2)[place[on]] = torch.stack([values[on], -values[on]], 1)
        end = start + len(place)
        for head, stored in enumerate(request.heads):
            column = values[:, head].tolist()
            stored.update((start + i, (value, -value)) for i, value in enumerate(column))
            if self.ring is not None and not self.promotes:
                for position in [p for p in stored if p >= self.sinks and p < end - self.ring.window]:
                    del stored[position]

    def after(self, request: Request) -> None:
        """Cut the prompt down as it comes in, or once it is complete."""
        if self.shared:
            if request.tokens in self.plan.cuts(request.end, 0, request.tokens):
                self.cut(request)
            return
        if not (self.plan.shrinks and request.tokens == request.end):
            return
        end, budgets = request.end, self.plan.kept(request.end)
        kept = [budgets[layer][head] for layer, head in self.local]
        generator = torch.Generator().manual_seed(self.written)
        stored = self.tables.locate(torch.tensor(request.slot), torch.arange(self.heads)[:, None], torch.arange(end))
        for head, count in enumerate(kept):
            chosen = torch.randperm(end, generator=generator)[:count].sort().values
            self.pool.copy_tokens(stored[head, chosen], stored[head, :count])
            self.tables.set_positions(stored[head, :count], chosen)
            request.heads[head] = {p: request.heads[head][p] for p in chosen.tolist()}
        before, after = self.plan.prefill_blocks(end), self.plan.decode_blocks(end, end)
        row = self.rows([request])
        source, target = self.tables.shrink(request.slot, row, torch.tensor(kept), before, after, max(kept))
        moved = source > 0
        assert set(source[moved].tolist()).isdisjoint(target.tolist()) and not target[~moved].any()
        self.pool.copy_pages(source, target)
        request.vacated = list(range(after, before))

    def cut(self, request: Request) -> None:
        """Heads share a budget: the model sorts one list of all tokens that are judged."""
        cuts, now = self.plan.cuts_of(request.end), request.tokens
        before = max(c for c in [0, *range(cuts.every, now, cuts.every)])
        judged = range(max(before - cuts.window, 0), max(now - cuts.window, 0))
        safe = {t for start, end in cuts.protect for t in range(start, end)}
        free = [(t, head) for t in judged if t not in safe for head in range(self.heads)]
        best = sorted(free, key=lambda one: -request.scores[one[1]][one[0]])
        for t, head in best[int(cuts.share * len(free)) :]:
            del request.heads[head][t]
        live = SimpleNamespace(slot=request.slot, prefill_end=request.end, plan=self.plan, row=self.rows([request]))
        self.cutter.cut(live, now)
        held, after = self.plan.held(request.end, now)
        entries = self.plan.row_entries(request.end, now)
        request.vacated += range(entries - (held - after), entries)

    # ---- checks

    def owned(self, request: Request) -> list[int]:
        """The request's blocks that its pages may lie in."""
        return [0 if entry in request.vacated else block for entry, block in enumerate(request.row)]

    def check(self) -> None:
        begun = [request for request in self.live if request.tokens]
        check_integrity(self.tables, {request.slot: self.owned(request) for request in begun})
        assert not self.tables.lengths[-1].any() and not self.tables._taken[-1].any()
        blocks = [block for request in self.live for block in request.row if block]
        assert sorted(blocks + self.free_blocks) == list(range(1, BLOCKS))
        for request in begun:
            self.check_pages(request)
            self.check_content(request)

    def check_pages(self, request: Request) -> None:
        """Pages in use fit the plan's blocks, and never exceed them."""
        end, tokens = request.end, request.tokens
        lengths = self.tables.lengths[request.slot].tolist()
        pages = sum(ceil_div(length, PAGE) for length in lengths)
        blocks = sum(block != 0 for block in self.owned(request))
        held = [self.plan.held(end, cut) for cut in self.plan.cuts(end, 0, tokens)]
        planned = self.plan.row_entries(end, tokens) - sum(before - after for before, after in held)
        assert min(lengths) >= 1
        assert blocks == planned
        assert pages <= planned * self.heads
        if self.shared:
            assert planned <= max(ceil_div(tokens, PAGE), 1) and len(request.row) <= ceil_div(tokens, PAGE) + 2
        elif self.plan.shape.tensor_parallel == 1 and not self.promotes:
            expected = self.plan.decode_pages(end, tokens) if request.decoding else self.plan.prefill_pages(tokens)
            assert pages == expected

    def check_content(self, request: Request) -> None:
        lengths = self.tables.lengths[request.slot]
        assert lengths.tolist() == [len(stored) for stored in request.heads]
        index = torch.arange(int(lengths.max()))
        slots = self.tables.locate(torch.tensor(request.slot), torch.arange(self.heads)[:, None], index)
        keys, values = self.pool.gather(slots)
        positions = self.tables.positions.flatten()[slots]
        for head, stored in enumerate(request.heads):
            count = len(stored)
            found = zip(keys[head, :count, 0].tolist(), values[head, :count, 0].tolist(), strict=True)
            assert dict(zip(positions[head, :count].tolist(), found, strict=True)) == stored
        assert kept_positions(self.tables, request.slot) == [sorted(stored) for stored in request.heads]


def ragged_budgets(seed: int, shape: ModelShape) -> Callable[[int], Kept]:
    """Arbitrary kept vectors, the same for the same prompt length: some heads keep all, some one token."""

    def kept(prompt_len: int) -> Kept:
        generator = torch.Generator().manual_seed(seed * 10_007 + prompt_len)
        share = torch.rand(shape.layers, shape.kv_heads, generator=generator) * 1.4 - 0.2
        return [[min(max(int(s * prompt_len), 1), prompt_len) for s in layer] for layer in share.tolist()]

    return kept


def shared_cuts(data: st.DataObject) -> Callable[[int], Cuts]:
    every = data.draw(st.sampled_from([16, 48, 100, 320]), "every")
    window, ratio = data.draw(st.integers(1, 80), "window"), data.draw(st.sampled_from([0.01, 0.3, 0.77, 1]), "ratio")
    protect = data.draw(st.sampled_from([(), ((3, 30),), ((0, 5), (90, 250))]), "protect")
    return lambda prompt_len: replace(Cuts.of_ratio(prompt_len, every, window, ratio), protect=protect)


PROMPTS = st.one_of(
    st.integers(1, 70), st.sampled_from([15, 16, 17, 32, 64]), st.integers(1000, 1100), st.integers(200, 500)
)


class Lifecycles(RuleBasedStateMachine):
    """The rules that all policies share; a subclass says which policy."""

    kind = "dense"

    @initialize(data=st.data(), layers=st.integers(1, 3), tensor_parallel=st.sampled_from([1, 1, 2, 4]))
    def start(self, data: st.DataObject, layers: int, tensor_parallel: int) -> None:
        kv_heads = data.draw(st.sampled_from([1, 2, 4]), "KV heads")
        shape = ModelShape(layers, kv_heads, 2 * kv_heads, 1, tensor_parallel)
        rank = data.draw(st.integers(0, tensor_parallel - 1), "rank")
        ring = kept = None
        if self.kind in ("ring", "promote"):
            ring = Ring(data.draw(st.integers(0, 20), "sinks"), data.draw(st.integers(1, 70), "window"))
        if self.kind == "shrink":
            kept = ragged_budgets(data.draw(st.integers(0, 1000), "budgets"), shape)
        if self.kind == "shared":
            self.world = World(shape, rank, SharedPlan(shape, shared_cuts(data)), None, promotes=False)
            return
        # A promoting head may keep the whole context: its plan is the dense one.
        plan = PagePlan(shape, kept, ring.tokens if self.kind == "ring" and ring else None)
        self.world = World(shape, rank, plan, ring, promotes=self.kind == "promote")

    @precondition(lambda self: self.world.free_slots)
    @rule(end=PROMPTS)
    def admit(self, end: int) -> None:
        self.world.admit(end)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A batch as vLLM forms it: one-token rows first, then chunks; some requests wait."""
        world = self.world
        singles: list[Request | None] = []
        chunks: list[tuple[Request, int]] = []
        for request in list(world.live):
            if data.draw(st.booleans(), "give back"):
                world.give_back(request)
            count = 1 if request.decoding else data.draw(self.chunk(request), "chunk")
            if request.tokens + count > MAX_TOKENS or data.draw(st.integers(0, 7), "scheduled") == 0:
                continue
            if not world.allocate(request, count):
                world.end(request)  # preempted
            elif self.only_decodes(request) or (count == 1 and data.draw(st.booleans(), "in a decode row")):
                singles.append(request)
            else:
                chunks.append((request, count))
        singles += [None] * data.draw(st.integers(0, 2), "padding")
        if singles:
            world.run_decodes(singles, lambda: [data.draw(st.booleans()) for _ in range(world.heads)])
        for request, count in chunks:
            world.run_chunk(request, count)

    def only_decodes(self, request: Request) -> bool:
        return request.decoding

    def chunk(self, request: Request) -> st.SearchStrategy[int]:
        left = request.end - request.tokens
        if self.world.shared:
            left = self.world.plan.cuts_of(request.end).next(request.tokens) - request.tokens
        return st.one_of(st.just(left), st.just(1), st.integers(1, left))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), steps=st.integers(1, 40))
    def decode_on(self, data: st.DataObject, steps: int) -> None:
        """Several steps of everything that decodes, without admissions between them."""
        world = self.world
        for _ in range(steps):
            batch: list[Request | None] = []
            for request in [r for r in world.live if r.decoding and r.tokens < MAX_TOKENS]:
                if world.allocate(request, 1):
                    batch.append(request)
            if batch:
                seed = torch.Generator().manual_seed(world.written)
                world.run_decodes(batch, lambda g=seed: (torch.rand(world.heads, generator=g) < 0.5).tolist())

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """Finished, aborted or preempted, at any point of its life."""
        self.world.end(data.draw(st.sampled_from(self.world.live)))

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for request in list(world.live):
            world.end(request)
        tables = world.tables
        assert sorted(world.free_blocks) == list(range(1, BLOCKS))
        assert sorted(tables._free_chunks[: int(tables._num_free)].tolist()) == list(range(tables.sizes.chunks))
        assert not tables.lengths.any()


class RingLifecycles(Lifecycles):
    kind = "ring"


class ShrinkLifecycles(Lifecycles):
    kind = "shrink"


class SharedLifecycles(Lifecycles):
    kind = "shared"


class PromoteLifecycles(Lifecycles):
    """Promotion works token by token: what a full ring takes goes through decode rows."""

    kind = "promote"

    def only_decodes(self, request: Request) -> bool:
        return request.decoding or request.tokens >= self.world.ring_tokens

    def chunk(self, request: Request) -> st.SearchStrategy[int]:
        room = max(self.world.ring_tokens - request.tokens, 1)
        return super().chunk(request).map(lambda count: min(count, room))


_SETTINGS = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
for _machine in (Lifecycles, RingLifecycles, ShrinkLifecycles, SharedLifecycles, PromoteLifecycles):
    _machine.TestCase.settings = _SETTINGS

TestDense = Lifecycles.TestCase
TestRing = RingLifecycles.TestCase
TestShrink = ShrinkLifecycles.TestCase
TestShared = SharedLifecycles.TestCase
TestPromote = PromoteLifecycles.TestCase

"""Satellites' way to the host and back: stores while prefilling, fetches on drift, landings at a step's start.

Fetched tokens wait in a staging buffer and are copied over the head's own prompt tokens in the step they are due.
A page flip instead of that copy would need a second set of pages in every request, about as large as what its
satellites keep; the copy inside device memory costs a fortieth of the transfer it follows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from vllm_kvplug.components.drift import positions_of, ranks, released_choice
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import PagePlan, ceil_div
from vllm_kvplug.policies.base import Retrieval
from vllm_kvplug.tiers.host import HostPool, Staging, rows_of
from vllm_kvplug.tiers.lane import Lane, Ticket
from vllm_kvplug.tiers.ledger import HOST_SLOT
from vllm_kvplug.worker.drift import DriftCheck, PivotQueries
from vllm_kvplug.worker.requests import Check, Flight, LiveRequest, Offloaded, upload

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry

MIB = 1 << 20


class Peers(Protocol):
    """The tensor-parallel ranks. All of them call the same methods in the same order, on CPU tensors."""

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """bool: where it is set on any rank."""

    def share(self, values: torch.Tensor, owner: int) -> torch.Tensor:
        """The `values` of rank `owner`, on every rank."""


@dataclass(frozen=True)
class Tiers:
    """Where offloaded tokens lie and wait, how they travel, and who else must know."""

    host: HostPool
    staging: Staging
    lane: Lane
    peers: Peers | None


@dataclass
class Counters:
    """What happened since they were last read."""

    checks: int = 0
    triggers: int = 0
    fetched_bytes: int = 0
    landings: int = 0
    late_landings: int = 0
    late_microseconds: int = 0

    def __bool__(self) -> bool:
        return any(vars(self).values())


class Wanted(NamedTuple):
    """What one satellite fetches.

    pivot: whose row of scores says which tokens. head: flat. tokens: how many. begin: how many of other satellites come
    before. host_row: of the request's host slots. most: tokens of the cluster's largest share.
    """

    pivot: int
    head: int
    tokens: int
    begin: int
    host_row: int
    most: int


class Retriever:
    """The host tier of one rank at work for its requests.

    on_check: is told of every concluded check the request's length at it, the length at which what it fetches lands,
    and which clusters that is for.
    """

    def __init__(
        self,
        retrieval: Retrieval,
        geometry: Geometry,
        queries: PivotQueries,
        pool: PagePool,
        tables: PageTables,
        tiers: Tiers,
    ):
        self.retrieval, self.geometry, self.queries = retrieval, geometry, queries
        self.pool, self.tables = pool, tables
        self.tiers = tiers
        self.host, self.staging, self.lane, self.peers = tiers.host, tiers.staging, tiers.lane, tiers.peers
        self.drift = DriftCheck(retrieval, geometry, queries, pool, tables)
        self.counters = Counters()
        self.on_check: Callable[[int, int, list[int]], None] = lambda length, due, clusters: None
        self._held_back: deque[tuple[Flight, slice]] = deque()
        self._landed: deque[tuple[int, Callable[[], float | None]]] = deque()  # clusters, and the seconds they waited

        self._in_kernel = tables.lengths.is_cuda and not retrieval.as_released

    def load_kernels(self) -> None:
        """They compile at start-up, on a satellite that fetches nothing."""
        self.drift.load_kernels()
        if self._in_kernel:
            from vllm_kvplug.kernels.fetches import fetches

            nothing = torch.zeros((5, 1), dtype=torch.int64, device=self.tables.lengths.device)
            nobody = torch.zeros_like(self.tables.directory[0])
            fetches(nothing[:1], nothing, nobody, self.tables.chunks, nothing[:1], 0)

    # ---- beginning and end

    def begin(self, request: LiveRequest) -> None:
        """Take host slots for a request whose satellites will be cut."""
        g = self.geometry
        places = request.policy.offloaded(request.prefill_end, g.head_range)
        everywhere = request.policy.offloaded(request.prefill_end, range(request.policy.shape.kv_heads))
        if not everywhere:
            return
        heads = sorted(layer * g.kv_heads + head - g.first_head for layer, head in places)
        slots = self.host.allocate(len(heads), ceil_div(request.prefill_end, HOST_SLOT))
        base_head = dict(zip(self.queries.clusters, self.queries.base_head, strict=True))
        request.offloaded = Offloaded.of(heads, slots, g.kv_heads, base_head, self.tables.lengths.device)

    def end(self, request: LiveRequest) -> None:
        """Forget a request. What it has in flight is dropped: a copy only ever writes to staging."""
        if request.offloaded is None:
            return
        for flight in request.offloaded.flights:
            self._release(flight)
        self.host.release(request.offloaded.slots)
        request.offloaded = None

    # ---- prompt: stores

    def store(self, request: LiveRequest, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Send a chunk's K and V [tokens, KV heads, d] of the layer's satellites to the host."""
        if request.offloaded is None or layer not in request.offloaded.of_layer:
            return
        rows, heads = request.offloaded.of_layer[layer]
        encoded = self.host.codec.encode(key[:, heads].transpose(0, 1), value[:, heads].transpose(0, 1))
        self._store(request.offloaded.slots_here[rows], start, encoded)

    def store_token(self, request: LiveRequest, position: int) -> None:
        """As `store`, for a prompt token that came in a decode row: from its pages, all layers."""
        if request.offloaded is None or not request.offloaded.of_layer:
            return
        heads = request.offloaded.heads
        where = self.tables.locate(request.slot, heads, torch.full_like(heads, position))
        key, value = self.pool.gather(where)
        self._store(request.offloaded.slots_here, position, self.host.codec.encode(key[:, None], value[:, None]))

    def _store(self, slots: torch.Tensor, start: int, encoded: torch.Tensor) -> None:
        self.lane.submit(lambda: self.host.write(slots, start, encoded), slots, encoded)

    def prompt_done(self, request: LiveRequest, layer: int, last_query: torch.Tensor) -> None:
        """The prompt's last query [query heads, d] of a layer makes the baselines."""
        if request.offloaded is not None:
            self.queries.set_base(request.slot, layer, last_query)

    # ---- decode: checks and landings

    def begin_step(self) -> None:
        """Submit what the limit per step held back, and count landings that are known to have waited."""
        left = self._limit
        while self._held_back and left > 0:
            flight, piece = self._held_back.popleft()
            if piece in flight.pieces:
                flight.pieces.remove(piece)
                flight.ticket = self._fetch(flight, piece)
                left -= (piece.stop - piece.start) * self.host.codec.token_bytes
        while self._landed and (seconds := self._landed[0][1]()) is not None:
            clusters, _ = self._landed.popleft()
            if seconds:
                self.counters.late_landings += clusters
                self.counters.late_microseconds += max(int(seconds * 1e6), 1)

    @property
    def _limit(self) -> int:
        """Bytes that may be fetched in one step."""
        return 1 << 62 if self.retrieval.step_mib is None else max(int(self.retrieval.step_mib * MIB), 1)

    def before_decode(self, request: LiveRequest, length: int) -> None:
        """At the start of the step after which the request has `length` tokens: land what is due.

        A check is concluded when its outcome is there, at the latest when it must land or its queries are overwritten.
        """
        state = request.offloaded
        if state is None:
            return
        if state.check is not None:
            last_chance = state.check.length + min(self.retrieval.land_after, self.retrieval.window)
            if length >= last_chance or state.check.ready is None or state.check.ready.query():
                self._conclude(request, state.check)
                state.check = None
        for flight in [f for f in state.flights if f.due <= length]:
            self._land(request, flight)

    def after_decode(self, request: LiveRequest, length: int) -> None:
        """At the end of that step: check for drift if the window of queries is full.

        It is when the prompt is complete, if so many of its queries were behind a context, and with every window of
        decoded tokens.
        """
        window, decoded = self.retrieval.window, length - request.prompt_len
        if request.offloaded is None or decoded < 0 or decoded % window or length - request.prefill_end < window:
            return
        self.counters.checks += 1
        check = self.drift.start(request, length)
        if self.peers is None:
            request.offloaded.check = check
        else:  # ranks exchange outcomes in step
            self._conclude(request, check)

    def _conclude(self, request: LiveRequest, check: Check) -> None:
        """Start fetching for the pivots that drifted and have nothing in flight."""
        assert request.offloaded is not None
        if check.ready is not None:
            check.ready.synchronize()
        flags = torch.zeros(len(self.retrieval.clusters), dtype=torch.bool)
        flags[check.clusters] = check.flags
        flags[list(check.in_flight)] = False
        if self.peers is not None:
            flags = self.peers.any(flags)
        triggered = flags.nonzero().flatten().tolist()
        shares = {c: self._shares(request, c) for c in triggered}
        size = sum(sum(share.values()) for share in shares.values()) * self.host.codec.token_bytes
        due = check.length + max(self.retrieval.land_after, ceil_div(size, self._limit))
        self.on_check(check.length, due, triggered)
        if not triggered:
            return
        self.counters.triggers += len(triggered)
        with self.drift.beside(request.offloaded.slots_here):
            flight = self._plan_flight(request, due, shares, self._scores(request, check, triggered))
        self.drift.rebase(request, [c for c in triggered if c in check.clusters])
        request.offloaded.flights.append(flight)
        self._launch(flight)

    def _shares(self, request: LiveRequest, cluster: int) -> dict[int, int]:
        """Prompt tokens of the cluster's satellites that were cut, by global head, on all ranks."""
        assert isinstance(request.plan, PagePlan)
        kept = request.plan.kept(request.prefill_end)[self.retrieval.clusters[cluster].layer]
        satellites = self.retrieval.clusters[cluster].satellites
        return {head: kept[head] for head in satellites if kept[head] < request.prefill_end}

    def _scores(self, request: LiveRequest, check: Check, triggered: list[int]) -> torch.Tensor:
        """Of the triggered pivots' newest queries, float32 [triggered, T]; from the first rank that holds each."""
        device, place = check.scores.device, {cluster: i for i, cluster in enumerate(check.clusters)}
        if self.peers is None:
            return check.scores[upload([place[cluster] for cluster in triggered], device)]
        shape, shared = request.policy.shape, []
        for cluster in triggered:
            pivot = self.retrieval.clusters[cluster].pivot
            owner = next(rank for rank in range(shape.tensor_parallel) if pivot in shape.rank_heads(rank))
            mine = check.scores[place[cluster]].cpu() if cluster in place else torch.zeros(request.prefill_end)
            shared.append(self.peers.share(mine, owner))
        return torch.stack(shared).to(device)

    def _plan_flight(
        self, request: LiveRequest, due: int, shares: dict[int, dict[int, int]], scores: torch.Tensor
    ) -> Flight:
        """What this rank's satellites fetch, and where it goes. shares: of the clusters whose `scores` these are."""
        assert request.offloaded is not None
        g, row, wanted, total = self.geometry, request.offloaded.row, [], 0
        for place, (cluster, share) in enumerate(shares.items()):
            for head, count in share.items():
                if head in g.head_range:
                    flat = g.flat(self.retrieval.clusters[cluster].layer, head)
                    wanted.append(Wanted(place, flat, count, total, row[flat], max(share.values())))
                    total += count
        target, positions, rows = self._places(request, ranks(scores), wanted, total)
        return Flight(list(shares), due, self.staging.take(total), target, positions.int(), rows)

    def _places(
        self, request: LiveRequest, rank: torch.Tensor, wanted: list[Wanted], total: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token slots, positions and rows of the host pool of all that is fetched, int64 [total] each."""
        assert request.offloaded is not None
        columns = upload([x for column in zip(*wanted, strict=True) for x in column], rank.device)
        columns = columns.view(len(Wanted._fields), len(wanted))
        slots = request.offloaded.slots_here
        if self._in_kernel:
            from vllm_kvplug.kernels.fetches import fetches

            directory, chunks = self.tables.directory[request.slot], self.tables.chunks
            positions, target, rows = fetches(rank, columns[:5], directory, chunks, slots, total)
            return target, positions, rows
        pivot, heads, counts, begin, host_row, most = columns
        chosen = rank[pivot] < counts[:, None]
        if self.retrieval.as_released:
            protected = request.policy.options.protected(request.prefill_end)
            chosen = released_choice(rank[pivot], counts[:, None], most[:, None], protected)
        positions = positions_of(chosen, counts, total)
        of = torch.repeat_interleave(torch.arange(len(wanted), device=rank.device), counts, output_size=total)
        index = torch.arange(total, device=rank.device) - begin[of]
        target = self.tables.locate(request.slot, heads[of], index)
        return target, positions, rows_of(slots[host_row[of], positions // HOST_SLOT], positions)

    def _launch(self, flight: Flight) -> None:
        """Begin to fetch, as fast as the limit per step allows. Without room in staging it happens at the landing."""
        total, row = len(flight.positions), self.host.codec.token_bytes
        self.counters.fetched_bytes += total * row
        if flight.staged is None or not total:
            return
        at_once = min(max(self._limit // row, 1), total)
        flight.pieces = [slice(first, min(first + at_once, total)) for first in range(0, total, at_once)]
        self._held_back.extend((flight, piece) for piece in flight.pieces)
        if self.retrieval.step_mib is None:
            self.begin_step()

    def _fetch(self, flight: Flight, piece: slice) -> Ticket:
        assert flight.staged is not None
        start = flight.staged.start
        return self._read(flight.rows[piece], self.staging.buffer[start + piece.start : start + piece.stop])

    def _read(self, rows: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Behind everything in the lane, for earlier stores may still be on their way, and behind what planned it."""
        with self.drift.beside():
            return self.lane.submit(lambda: self.host.read(rows, target), rows, target)

    def _land(self, request: LiveRequest, flight: Flight) -> None:
        """Overwrite the satellites' prompt tokens with the fetched ones; what follows waits for them if it must."""
        assert request.offloaded is not None
        began, behind = time.perf_counter(), bool(flight.pieces) or flight.staged is None
        for piece in flight.pieces:
            flight.ticket = self._fetch(flight, piece)
        flight.pieces.clear()
        if flight.staged is None:
            content = self.staging.buffer.new_empty((len(flight.positions), self.staging.buffer.shape[1]))
            flight.ticket = self._read(flight.rows, content)
        else:
            content = self.staging.buffer[flight.staged]
        if flight.ticket is not None:
            waited = flight.ticket.join()
            lost = time.perf_counter() - began if behind else 0.0
            self._landed.append((len(flight.clusters), lambda: None if (w := waited()) is None else w + lost))
        self.pool.put(flight.target, content)
        self.tables.put_positions(flight.target, flight.positions)
        self.drift.keep_for_caller(flight.target, flight.positions)
        self.counters.landings += len(flight.clusters)
        request.offloaded.flights.remove(flight)
        self._release(flight)

    def _release(self, flight: Flight) -> None:
        flight.pieces.clear()
        if flight.staged:
            self.staging.give_back(flight.staged)

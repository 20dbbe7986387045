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
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_kvplug.components.drift import released_positions, satellite_positions
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import PagePlan, ceil_div
from vllm_kvplug.policies.base import Retrieval
from vllm_kvplug.tiers.host import HostPool, Staging
from vllm_kvplug.tiers.lane import Lane
from vllm_kvplug.tiers.ledger import HOST_SLOT
from vllm_kvplug.worker.drift import DriftCheck, PivotQueries
from vllm_kvplug.worker.requests import Check, Flight, LiveRequest, Offloaded

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
        self._held_back: deque[tuple[Flight, Callable[[], None], int]] = deque()

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
        for flight in request.offloaded.flights.values():
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
        self._store(request.offloaded.slots[rows], start, encoded)

    def store_token(self, request: LiveRequest, position: int) -> None:
        """As `store`, for a prompt token that came in a decode row: from its pages, all layers."""
        if request.offloaded is None or not request.offloaded.of_layer:
            return
        heads = request.offloaded.heads
        where = self.tables.locate(request.slot, heads, torch.full_like(heads, position))
        key, value = self.pool.gather(where)
        self._store(request.offloaded.slots, position, self.host.codec.encode(key[:, None], value[:, None]))

    def _store(self, slots: torch.Tensor, start: int, encoded: torch.Tensor) -> None:
        self.lane.submit(lambda: self.host.write(slots, start, encoded), encoded)

    def prompt_done(self, request: LiveRequest, layer: int, last_query: torch.Tensor) -> None:
        """The prompt's last query [query heads, d] of a layer makes the baselines."""
        if request.offloaded is not None:
            self.queries.set_base(request.slot, layer, last_query)

    # ---- decode: checks and landings

    def begin_step(self) -> None:
        """Submit what the limit per step held back."""
        left = self._limit
        while self._held_back and left > 0:
            flight, job, size = self._held_back.popleft()
            if job in flight.pieces:
                flight.pieces.remove(job)
                flight.ticket = self.lane.submit(job)
                left -= size

    @property
    def _limit(self) -> int:
        return 1 << 62 if self.retrieval.step_mib is None else max(int(self.retrieval.step_mib * MIB), 1)

    def before_decode(self, request: LiveRequest, length: int) -> None:
        """At the start of the step after which the request has `length` tokens: land what is due."""
        state = request.offloaded
        if state is None:
            return
        if state.check is not None:
            last_chance = length >= state.check.length + self.retrieval.land_after
            if last_chance or state.check.ready is None or state.check.ready.query():
                self._conclude(request, state.check)
                state.check = None
        for flight in [f for f in state.flights.values() if f.due <= length]:
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
        """Start fetching for the pivots that drifted."""
        assert request.offloaded is not None
        if check.ready is not None:
            check.ready.synchronize()
        own = dict(zip(check.clusters, check.orders, strict=True))
        flags = torch.zeros(len(self.retrieval.clusters), dtype=torch.bool)
        flags[check.clusters] = check.flags.cpu()
        if self.peers is not None:
            flags = self.peers.any(flags)
        triggered = flags.nonzero().flatten().tolist()
        budgets = {c: self._budgets(request, c) for c in triggered}
        size = sum(sum(b.values()) for b in budgets.values()) * self.host.codec.token_bytes
        due = check.length + max(self.retrieval.land_after, ceil_div(size, self._limit))
        self.on_check(check.length, due, triggered)
        for cluster in triggered:
            order = self._share_order(request, cluster, own.get(cluster), max(budgets[cluster].values(), default=0))
            if cluster in own:
                self.drift.rebase(request, cluster)
            self.counters.triggers += 1
            self._launch(request, cluster, due, budgets[cluster], order)

    def _budgets(self, request: LiveRequest, cluster: int) -> dict[int, int]:
        """Prompt tokens of the cluster's satellites that were cut, by global head, on all ranks."""
        assert isinstance(request.plan, PagePlan)
        kept = request.plan.kept(request.prefill_end)[self.retrieval.clusters[cluster].layer]
        satellites = self.retrieval.clusters[cluster].satellites
        return {head: kept[head] for head in satellites if kept[head] < request.prefill_end}

    def _share_order(self, request: LiveRequest, cluster: int, order: torch.Tensor | None, most: int) -> torch.Tensor:
        """The best `most` positions of a pivot, from the first rank that holds it."""
        if self.peers is None:
            assert order is not None
            return order[:most]
        shape, pivot = request.policy.shape, self.retrieval.clusters[cluster].pivot
        owner = next(rank for rank in range(shape.tensor_parallel) if pivot in shape.rank_heads(rank))
        mine = torch.zeros(most, dtype=torch.int64) if order is None else order[:most].cpu()
        return self.peers.share(mine, owner).to(self.tables.lengths.device)

    def _launch(
        self, request: LiveRequest, cluster: int, due: int, budgets: dict[int, int], order: torch.Tensor
    ) -> None:
        assert request.offloaded is not None
        g, layer = self.geometry, self.retrieval.clusters[cluster].layer
        local = {h: count for h, count in budgets.items() if h in g.head_range}
        most = max(budgets.values(), default=0)
        if self.retrieval.as_released:
            protected = request.policy.options.protected(request.prefill_end)
            positions = [released_positions(order, count, most, protected) for count in local.values()]
        else:
            positions = [satellite_positions(order, count) for count in local.values()]
        heads = [layer * g.kv_heads + h - g.first_head for h in local]
        flight = Flight(cluster, due, heads, positions, self.staging.take(sum(local.values())))
        request.offloaded.flights[cluster] = flight
        self.counters.fetched_bytes += sum(local.values()) * self.host.codec.token_bytes
        if flight.staged is None:
            return
        start = flight.staged.start
        for head, where in zip(heads, positions, strict=True):
            target = self.staging.buffer[start : start + len(where)]
            job = self._fetch(request.offloaded.slots_of(head), where, target)
            flight.pieces.append(job)
            self._held_back.append((flight, job, len(where) * self.host.codec.token_bytes))
            start += len(where)
        if self.retrieval.step_mib is None:
            self.begin_step()

    def _fetch(self, slots: torch.Tensor, positions: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        def job() -> None:
            target.copy_(self.host.read(slots, positions.cpu()))

        return job

    def _land(self, request: LiveRequest, flight: Flight) -> None:
        """Overwrite the satellites' prompt tokens with the fetched ones; waits for them if it must."""
        assert request.offloaded is not None
        late = bool(flight.pieces) or flight.staged is None or (flight.ticket is not None and not flight.ticket.done)
        began = time.perf_counter()
        for job in flight.pieces:
            flight.ticket = self.lane.submit(job)
        flight.pieces.clear()
        if flight.ticket is not None:
            flight.ticket.wait()
        device = self.tables.lengths.device
        start = flight.staged.start if flight.staged else 0
        for head, where in zip(flight.heads, flight.positions, strict=True):
            if flight.staged:
                content = self.staging.buffer[start : start + len(where)]
            else:
                content = self._read_now(request.offloaded.slots_of(head), where).to(device)
            start += len(where)
            index = torch.arange(len(where), device=device)
            target = self.tables.locate(request.slot, head, index)
            self.pool.put(target, content)
            self.tables.set_positions(target, where)
        self.counters.landings += 1
        if late:
            self.counters.late_landings += 1
            self.counters.late_microseconds += int((time.perf_counter() - began) * 1e6)
        del request.offloaded.flights[flight.cluster]
        self._release(flight)

    def _read_now(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Read behind everything in the lane: earlier stores may still be on their way."""
        result: list[torch.Tensor] = []
        self.lane.submit(lambda: result.append(self.host.read(slots, positions.cpu()))).wait()
        return result[0]

    def _release(self, flight: Flight) -> None:
        flight.pieces.clear()
        if flight.staged:
            self.staging.give_back(flight.staged)

"""Pivots' queries, and the check whether a pivot's attention has drifted from its baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_kvplug.components.drift import drifted, overlaps, pivot_scores, ranking
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.policies.base import Retrieval
from vllm_kvplug.worker.requests import Check, LiveRequest

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry


class PivotQueries:
    """Queries of the pivots that this rank holds: of the last `window` decoded tokens, and the baseline's.

    recent [slots + 1, window, pivots, group, d] is written by decode rows inside the captured graph, at the place
    that the row's phase says; the spare last slot takes padding rows. base [slots + 1, pivots, group, d]: a
    baseline is remembered as the query that made it, since its tokens follow from it.
    """

    def __init__(self, retrieval: Retrieval, geometry: Geometry, device: torch.device):
        self.geometry = geometry
        self.clusters = [i for i, c in enumerate(retrieval.clusters) if c.pivot in geometry.head_range]
        self.place = {cluster: place for place, cluster in enumerate(self.clusters)}
        pivots = [retrieval.clusters[i] for i in self.clusters]
        self._of_layer: dict[int, tuple[slice, torch.Tensor, torch.Tensor]] = {}
        self.base_head = [c.pivot - geometry.first_head for c in pivots]
        for layer in sorted({c.layer for c in pivots}):
            places = [place for place, c in enumerate(pivots) if c.layer == layer]
            heads = [self.base_head[place] for place in places]
            # The released code keeps baselines by head and reads them in the order of the profile.
            first = sorted(heads) if retrieval.as_released else heads
            self.base_head[places[0] : places[-1] + 1] = first
            index = slice(places[0], places[-1] + 1)
            self._of_layer[layer] = (index, torch.tensor(heads, device=device), torch.tensor(first, device=device))
        shape = (len(pivots), geometry.query_heads // geometry.kv_heads, geometry.head_dim)
        slots = geometry.max_requests + 1
        self.recent = torch.zeros((slots, retrieval.window, *shape), dtype=geometry.dtype, device=device)
        self.base = torch.zeros((slots, *shape), dtype=geometry.dtype, device=device)

    def record(self, row_slot: torch.Tensor | int, phase: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        """Keep the pivots' queries of every decode row, [rows, query heads, d]. Safe inside a captured graph."""
        if layer in self._of_layer:
            index, heads, _ = self._of_layer[layer]
            self.recent[row_slot, phase, index] = self._by_head(query)[:, heads]

    def record_chunk(self, slot: int, end: int, layer: int, query: torch.Tensor) -> None:
        """As `record`, for a chunk of one request; end: of the chunk, counted from the end of the request's prompt."""
        newest = query[-self.recent.shape[1] :]
        phase = torch.arange(end - len(newest), end, device=query.device) % self.recent.shape[1]
        self.record(slot, phase, layer, newest)

    def set_base(self, slot: int, layer: int, query: torch.Tensor) -> None:
        """The prompt's last query [query heads, d] makes the first baselines of a layer."""
        if layer in self._of_layer:
            index, _, first = self._of_layer[layer]
            self.base[slot, index] = self._by_head(query[None])[0, first]

    def _by_head(self, query: torch.Tensor) -> torch.Tensor:
        return query.unflatten(1, (self.geometry.kv_heads, -1))


class DriftCheck:
    """Compares what pivots attend to now with their baselines."""

    def __init__(
        self, retrieval: Retrieval, geometry: Geometry, queries: PivotQueries, pool: PagePool, tables: PageTables
    ):
        self.retrieval, self.geometry, self.queries = retrieval, geometry, queries
        self.pool, self.tables = pool, tables

    def start(self, request: LiveRequest, length: int) -> Check:
        """Check all pivots that have nothing in flight; the outcome may still be on its way. No host sync."""
        assert request.offloaded is not None
        clusters = [c for c in self.queries.clusters if c not in request.offloaded.flights]
        flags, orders = [], []
        for cluster in clusters:
            flag, order = self._check(request, cluster)
            flags.append(flag)
            orders.append(order)
        device = self.tables.lengths.device
        outcome = torch.stack(flags) if flags else torch.zeros(0, dtype=torch.bool, device=device)
        if device.type != "cuda":
            return Check(length, clusters, outcome, orders, None)
        host = torch.empty(outcome.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(outcome, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Check(length, clusters, host, orders, ready)

    def _check(self, request: LiveRequest, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether the pivot has drifted, and the ranking of its newest query, int64 [prompt tokens]."""
        assert request.offloaded is not None
        how, place, slot = self.retrieval, self.queries.place[cluster], request.slot
        layer, pivot = how.clusters[cluster].layer, how.clusters[cluster].pivot - self.geometry.first_head
        keys = self._keys(request, layer, pivot)
        scores = pivot_scores(self.queries.recent[slot, :, place], keys, self.geometry.scale, how.kernel)
        order = ranking(scores)
        base_head = request.offloaded.base_head[cluster]
        base_keys = keys if base_head == pivot else self._keys(request, layer, base_head)
        base = ranking(pivot_scores(self.queries.base[slot, place][None], base_keys, self.geometry.scale, how.kernel))
        count = request.policy.drift_tokens(request.prefill_end)
        flag = drifted(overlaps(order, base[0], count), how.threshold)
        for start, end in request.policy.options.protect:  # they are fetched again before all others
            scores[-1, start:end] = torch.inf
        return flag, ranking(scores[-1]) if request.policy.options.protect else order[-1]

    def _keys(self, request: LiveRequest, layer: int, head: int) -> torch.Tensor:
        """A pivot's prompt keys [tokens, d]: it keeps them all, in order."""
        device = self.tables.lengths.device
        index = torch.arange(request.prefill_end, device=device)
        return self.pool.gather(self.tables.locate(request.slot, layer * self.geometry.kv_heads + head, index))[0]

    def rebase(self, request: LiveRequest, cluster: int) -> None:
        """After a trigger the newest query is the baseline."""
        assert request.offloaded is not None
        place = self.queries.place[cluster]
        self.queries.base[request.slot, place] = self.queries.recent[request.slot, -1, place]
        request.offloaded.base_head[cluster] = self.retrieval.clusters[cluster].pivot - self.geometry.first_head

"""Pivots' queries, and the check whether a pivot's attention has drifted from its baseline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from vllm_kvplug.components.drift import best, drifted, overlaps, pivot_scores
from vllm_kvplug.memory import pivots_at_once
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.policies.base import Retrieval
from vllm_kvplug.worker.requests import Check, LiveRequest, upload

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry


KERNEL_DIMS = (16, 32, 64, 128, 256)
KERNEL_BYTES = 1 << 16
"""Head sizes that kernels/pivot_scores.py takes, and bytes of a pivot's queries, which it holds on chip."""


class PivotQueries:
    """Queries of the pivots that this rank holds: of the last `window` decoded tokens, and the baseline's.

    recent [slots + 1, window, pivots, group, d] is written by decode rows inside the captured graph, at the place
    that the row's phase says; the spare last slot takes padding rows. base [slots + 1, pivots, group, d]: a
    baseline is remembered as the query that made it, since its tokens follow from it. pivot_heads: flat heads, int64.
    """

    def __init__(self, retrieval: Retrieval, geometry: Geometry, device: torch.device):
        self.geometry = geometry
        self.clusters = [i for i, c in enumerate(retrieval.clusters) if c.pivot in geometry.head_range]
        self.place = {cluster: place for place, cluster in enumerate(self.clusters)}
        pivots = [retrieval.clusters[i] for i in self.clusters]
        self._of_layer: dict[int, tuple[slice, torch.Tensor, torch.Tensor]] = {}
        self.base_head = [c.pivot - geometry.first_head for c in pivots]
        flat = [geometry.flat(c.layer, c.pivot) for c in pivots]
        self.pivot_heads = torch.tensor(flat, dtype=torch.int64, device=device)
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
    """Compares what pivots attend to now with their baselines. On CUDA beside the model, on a stream of its own."""

    def __init__(
        self, retrieval: Retrieval, geometry: Geometry, queries: PivotQueries, pool: PagePool, tables: PageTables
    ):
        self.retrieval, self.geometry, self.queries = retrieval, geometry, queries
        self.pool, self.tables = pool, tables
        self._device = tables.lengths.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        rows = (retrieval.window + 1) * geometry.query_heads // geometry.kv_heads
        fits = geometry.head_dim in KERNEL_DIMS and rows * geometry.head_dim * geometry.dtype.itemsize <= KERNEL_BYTES
        self._in_pages = self._stream is not None and fits
        self._layers = [retrieval.clusters[cluster].layer for cluster in queries.clusters]

    def load_kernels(self) -> None:
        """They compile at start-up, on a token of nobody's."""
        if self._in_pages and self.queries.clusters:
            nobody = torch.zeros_like(self.tables.directory[0])
            for count in (self.retrieval.window, 1) if self.retrieval.as_released else (self.retrieval.window + 1,):
                queries = self.queries.base[0, :1, None].expand(1, count, -1, -1)
                self._read_pages(queries, self.queries.pivot_heads[:1], nobody, 1)

    @contextmanager
    def beside(self, *inputs: torch.Tensor) -> Iterator[None]:
        """What happens here sees all that was queued before, which goes on beside it. inputs: tensors it reads."""
        if self._stream is None:
            yield
            return
        for tensor in inputs:
            tensor.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def keep_for_caller(self, *tensors: torch.Tensor) -> None:
        """Tensors made beside the model that are given up while what the caller has queued still reads them."""
        for tensor in tensors if self._stream else ():
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def start(self, request: LiveRequest, length: int) -> Check:
        """Check all pivots, unless all have something in flight; the outcome may still be on its way. No host sync.

        Pages of a pivot's prompt stay as they are while the request lives. Its queries do not: they are copied.
        """
        assert request.offloaded is not None
        in_flight = request.offloaded.in_flight
        if in_flight.issuperset(self.queries.clusters):
            nothing = torch.zeros(0, device=self._device)
            return Check(length, [], in_flight, torch.zeros(0, dtype=torch.bool), nothing[:, None], None)
        recent, base = self.queries.recent[request.slot].clone(), self.queries.base[request.slot].clone()
        by_layer = zip(self._layers, request.offloaded.base_head.values(), strict=True)
        base_heads = upload([layer * self.geometry.kv_heads + head for layer, head in by_layer], self._device)
        with self.beside(recent, base, base_heads):
            flags, scores = self._compare(request, recent.transpose(0, 1), base[:, None], base_heads)
            if self._stream is None:
                return Check(length, self.queries.clusters, in_flight, flags, scores, None)
            host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
            host.copy_(flags, non_blocking=True)
            return Check(length, self.queries.clusters, in_flight, host, scores, self._stream.record_event())

    def _compare(
        self, request: LiveRequest, recent: torch.Tensor, base: torch.Tensor, base_heads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether pivots have drifted, bool [pivots], and the scores of their newest queries, float32 [pivots, T].

        recent [pivots, window, group, d], base [pivots, 1, group, d]: their queries. base_heads int64 [pivots]: flat
        heads that made the baselines. So many pivots at a time that workspace has a bound.
        """
        how, tokens, heads = self.retrieval, request.prefill_end, self.queries.pivot_heads
        count = request.policy.drift_tokens(tokens)
        some = pivots_at_once(self.geometry, how.window, tokens, self._in_pages)
        flags, newest = [], torch.empty((len(recent), tokens), device=self._device)
        for first in range(0, len(recent), some):
            part = slice(first, first + some)
            if how.as_released:
                scores = self._scores(request, recent[part], heads[part])
                before = self._scores(request, base[part], base_heads[part])
            else:
                both = self._scores(request, torch.cat([recent[part], base[part]], 1), heads[part])
                scores, before = both[:, :-1], both[:, -1:]
            shares = overlaps(best(scores, count), best(before, count), count)
            flags.append(drifted(shares, how.threshold))
            newest[part] = scores[:, -1]
        for start, end in request.policy.options.protect:  # they are fetched again before all others
            newest[:, start:end] = torch.inf
        return torch.cat(flags), newest

    def _scores(self, request: LiveRequest, queries: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Scores of queries [pivots, n, group, d] over flat `heads` [pivots], which keep the prompt whole, in order."""
        if self._in_pages:
            return self._read_pages(queries, heads, self.tables.directory[request.slot], request.prefill_end)
        index = torch.arange(request.prefill_end, device=self._device)
        keys = self.pool.keys(self.tables.locate(request.slot, heads[:, None], index))
        return pivot_scores(queries, keys, self.geometry.scale, self.retrieval.kernel)

    def _read_pages(
        self, queries: torch.Tensor, heads: torch.Tensor, directory: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        from vllm_kvplug.kernels import pivot_scores as kernel

        where = self.pool.pages, directory, self.tables.chunks, heads
        return kernel.pivot_scores(queries, *where, tokens, self.geometry.scale, self.retrieval.kernel)

    def rebase(self, request: LiveRequest, clusters: list[int]) -> None:
        """After a trigger the newest query is the baseline."""
        assert request.offloaded is not None
        for cluster in clusters:
            pivot = self.retrieval.clusters[cluster].pivot - self.geometry.first_head
            request.offloaded.base_head[cluster] = pivot
        places = upload([self.queries.place[cluster] for cluster in clusters], self._device)
        self.queries.base[request.slot, places] = self.queries.recent[request.slot, -1, places]

"""The worker's state for one engine: live requests, page tables, and the plan of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count as numbers
from typing import Any

import torch

from vllm_kvplug import ops
from vllm_kvplug.lifecycle import Lifecycle
from vllm_kvplug.memory import Charges, Geometry, charges, staging_tokens
from vllm_kvplug.metrics import PREFIX
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import SharedPlan
from vllm_kvplug.policies.base import Policy
from vllm_kvplug.policies.from_host import FromHost
from vllm_kvplug.tiers.codecs import Codec
from vllm_kvplug.tiers.host import HostPool, Staging
from vllm_kvplug.tiers.lane import Lane
from vllm_kvplug.worker import flash
from vllm_kvplug.worker.admission import Admitter, protected_tokens
from vllm_kvplug.worker.cuts import Cutter
from vllm_kvplug.worker.drift import PivotQueries
from vllm_kvplug.worker.flash import FlashPlan
from vllm_kvplug.worker.hosting import HostedSelector, HostingAdmitter, HostingCutter
from vllm_kvplug.worker.page_selection import PageSelector
from vllm_kvplug.worker.prompt_end import PromptEnd, QueryWindows
from vllm_kvplug.worker.recent import RecentQueries
from vllm_kvplug.worker.requests import LiveRequest, upload
from vllm_kvplug.worker.retrieval import Counters, Peers, Retriever, Tiers
from vllm_kvplug.worker.selection import TokenSelector
from vllm_kvplug.worker.sparse import SparsePlan
from vllm_kvplug.worker.step import PrefillRow, Step
from vllm_kvplug.worker.warm_up import load_kernels

_NUMBERS = numbers()
UNBOUNDED = 1 << 30
"""Ring size of a head that only appends."""


@dataclass(eq=False)
class Runtime:
    """One engine's policy at work on one rank.

    Between `begin_step` and `end_step` a real batch is running; outside of them vLLM only profiles, warms
    up or captures graphs, and every row is a padding row.
    """

    policy: Policy
    geometry: Geometry
    device: torch.device
    max_batch: int
    max_rows: int
    peers: Peers | None = None
    live: dict[str, LiveRequest] = field(default_factory=dict)
    pool: PagePool | None = None
    tables: PageTables | None = None
    runner: Any = None

    def __post_init__(self) -> None:
        self.ring_tokens = self.policy.ring.tokens if self.policy.ring else UNBOUNDED
        self.decode_ring = self.policy.local.tokens if self.policy.local else self.ring_tokens
        self.sinks = self.policy.ring.sinks if self.policy.ring else 0
        self.deferred = self.policy.local is not None and self.policy.local.deferred
        fits = flash.runs_here(self.geometry.dtype, self.geometry.head_dim, self.device)
        self.flash = fits and self.policy.ring is None
        self.in_step = False
        self._free_slots = list(range(self.geometry.max_requests - 1, -1, -1))
        self._decoding: list[tuple[LiveRequest, int]] = []
        self._due: list[tuple[LiveRequest, int, int]] = []
        self._make_gate()
        at_cuts, window = self.policy.shares_budget, self.policy.query_window
        self.windows = QueryWindows(self.geometry, 0 if at_cuts else window, self.device)
        self.recent = RecentQueries(self.geometry, window if at_cuts else 0, self.device)
        retrieval = self.policy.retrieval
        self.pivots = PivotQueries(retrieval, self.geometry, self.device) if retrieval else None
        self.retriever: Retriever | None = None
        self.selector: TokenSelector | None = None
        self.page_selector: PageSelector | None = None
        g = self.geometry
        heads = g.kv_heads, g.query_heads, g.head_dim
        self.decode_plan = ops.decode_plan(self.max_rows, g.layers, *heads, g.dtype, self.device)

    def _make_gate(self) -> None:
        """The gate, room for what it makes of a step's hidden states, and which layers' it gets to see."""
        g, policy = self.geometry, self.policy
        self.gate = policy.make_gate(g.head_range, g.dtype, self.device) if policy.gated else None
        columns = policy.gate_columns(g.kv_heads)
        shape = (self.max_batch, columns)
        self.projected = torch.zeros(shape, dtype=g.dtype, device=self.device) if columns else None
        self.tapped: set[int] = set()
        self.gate_asked = True
        self.spares_gate = self.gate is not None and not policy.judges_answers
        self.number = next(_NUMBERS)

    # ---- memory

    @cached_property
    def charges(self) -> Charges:
        """Device memory beside head pages."""
        plans = 2 if self.policy.page_selection else 1  # of all layers, and of what one layer's queries selected
        plan_bytes = plans * self.decode_plan.nbytes if self.decode_plan else 0
        decode_rows = self.max_rows if self.device.type == "cuda" else 0
        return charges(self.policy, self.geometry, self.max_batch, plan_bytes, decode_rows)

    def bind(self, layer_cache: torch.Tensor, blocks: int) -> None:
        """Take over the KV allocation. Called once it has its final size, before the first real step."""
        g = self.geometry
        self.pool = PagePool.over(layer_cache, g.layers, g.dtype)
        self.tables = PageTables(g.table_sizes(blocks, self.policy), self.device)
        self._place = torch.full((self.max_batch, g.heads), -1, dtype=torch.int64, device=self.device)
        self._row_slot = torch.full((self.max_batch,), -1, dtype=torch.int32, device=self.device)
        self._position = torch.zeros(self.max_batch, dtype=torch.int64, device=self.device)
        self._phase = torch.zeros(self.max_batch, dtype=torch.int64, device=self.device)
        rooms = g, self.pool, self.tables
        self.prompt_end = PromptEnd(*rooms)
        local, pages = self.policy.local, self.policy.page_selection
        if pages:
            self.page_selector = PageSelector(pages.dense_layers, *rooms, self.max_rows, pages.local_pages)
        self.cutter = Cutter(*rooms, self.recent) if local is None else None
        self.admitter: Admitter | None = None
        pin, capacity = self.device.type == "cuda", self.policy.host_capacity(g.dtype.itemsize)
        if isinstance(self.policy, FromHost):
            codec = Codec(self.policy.codec(), g.head_dim, g.dtype)
            where = self.pool, self.tables, HostPool(capacity, codec, pin, g.heads), Lane(self.device)
            kind = HostedSelector if self.policy.shares_budget else TokenSelector
            self.selector = kind(self.policy, g, *where, self.max_rows)
        if isinstance(self.selector, HostedSelector) and local is None:
            self.cutter = HostingCutter(*rooms, self.selector)
        if local is not None and self.gate is not None:
            given = *rooms, local, self.gate, self.recent
            if isinstance(self.selector, HostedSelector):
                self.admitter = HostingAdmitter(*given, self.selector)
            else:
                self.admitter = Admitter(*given, self.page_selector)
        if self.policy.retrieval and self.pivots:
            codec = Codec(self.policy.retrieval.codec, g.head_dim, g.dtype)
            host = HostPool(capacity, codec, pin)
            staging = Staging(staging_tokens(self.policy, g), g.head_dim, g.dtype, self.device)
            tiers = Tiers(host, staging, Lane(self.device), self.peers)
            self.retriever = Retriever(self.policy.retrieval, g, self.pivots, self.pool, self.tables, tiers)
        load_kernels(self)

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call; empty if nothing did."""
        if self.retriever is None or not self.retriever.counters:
            return {}
        counts, self.retriever.counters = vars(self.retriever.counters), Counters()
        return {PREFIX + name: count for name, count in counts.items() if count}

    def close(self) -> None:
        """Finish what is in the background. The engine is shutting down."""
        if self.retriever:
            self.retriever.tiers.lane.close()
        if self.selector:
            self.selector.lane.close()

    @property
    def offloader(self) -> Retriever | TokenSelector | None:
        """What sends prompts to the host."""
        return self.retriever or self.selector

    # ---- the way of a step

    def begin_step(self, lifecycle: Lifecycle) -> None:
        """Forget ended requests and give new ones a slot."""
        gone = [self.live.pop(request_id) for request_id in lifecycle.ended if request_id in self.live]
        if gone:
            assert self.tables is not None
            self.tables.free([request.slot for request in gone])
        for request in gone:
            self.windows.drop(request.slot)
            if self.offloader:
                self.offloader.end(request)
            self._free_slots.append(request.slot)
        for request_id, admission in lifecycle.admitted.items():
            request = LiveRequest.admit(self._free_slots.pop(), admission, self.policy)
            self.live[request_id] = request
            if self.offloader:
                self.offloader.begin(request)
        if self.retriever:
            self.retriever.begin_step()
        self._decoding, self._due = [], []
        self.in_step = True

    def ask_gate(self, counts: Mapping[str, int], before: Mapping[str, int]) -> None:
        """Before a step, if the policy `spares_gate`: whether the step needs scores. One of single tokens needs none,
        but for those of prompts that a cut will judge. counts, before: tokens of every request, in the step and before.

        What is captured for decode steps asks no gate (`padding_step`), so a step that does must not replay it.
        """
        self.gate_asked = any(n > 1 or self.live[name].judges(before[name]) for name, n in counts.items())

    def padding_step(self, rows: int, tokens: int) -> Step:
        """The metadata of a warm-up, profiling or capture batch: nothing is read or written."""
        if self.pool is None:
            nothing = torch.empty(0, dtype=torch.int64)
            return Step(0, nothing.int(), nothing, nothing[:, None].expand(0, self.geometry.heads), nothing)
        self._row_slot[:rows] = -1
        self._place[:tokens] = -1
        decode_rows = rows if rows == tokens else 0
        self.gate_asked = not (self.spares_gate and decode_rows)
        self._prepare_selection([], [], decode_rows)
        self._plan_decode(decode_rows)
        tables = self._row_slot[:rows], self._phase[:rows], self._place[:tokens], self._position[:tokens]
        return Step(decode_rows, *tables)

    def prepare(
        self,
        request_ids: Sequence[str],
        query_starts: Sequence[int],
        lengths: Sequence[int],
        device_lengths: torch.Tensor,
        block_rows: torch.Tensor,
        padded_rows: int,
        padded_tokens: int,
    ) -> Step:
        """Place the tokens of a batch in every (layer, head), and describe it for the layers.

        request_ids: of the live rows, in row order. query_starts: their first tokens, and the end.
        lengths: their tokens after this step. device_lengths, block_rows: as vLLM has them on the device,
        [padded rows] and [padded rows, blocks].
        """
        assert self.tables is not None
        rows = [self.live[request_id] for request_id in request_ids]
        counts = [query_starts[i + 1] - query_starts[i] for i in range(len(rows))]
        self._note_cuts(rows, counts, lengths, block_rows)
        if self.admitter:
            self.admitter.score_rings(rows, counts, lengths)
        decode_rows = next((i for i, count in enumerate(counts) if count != 1), len(rows))
        if decode_rows == len(rows):  # a captured graph may replay it with padding rows
            decode_rows = padded_rows if padded_rows == padded_tokens else decode_rows
        live_decodes = min(decode_rows, len(rows))
        slots = [r.slot for r in rows[:live_decodes]] + [-1] * (decode_rows - live_decodes)
        phases = [self._begin_decode(rows[i], lengths[i], i, block_rows) for i in range(live_decodes)]
        phases += [0] * (decode_rows - live_decodes)
        self._prepare_selection(rows[:live_decodes], lengths[:live_decodes], decode_rows)
        self._place[:padded_tokens] = -1
        if decode_rows:
            on_device, phase = upload(torch.tensor([slots, phases]), self.device)
            self._row_slot[:decode_rows] = on_device
            self._phase[:decode_rows] = phase
            last = device_lengths[:decode_rows].long() - 1
            places = self._place[:decode_rows]
            self._position[:decode_rows] = last
            if self.admitter:
                self.admitter.promote(on_device, block_rows[:decode_rows], last)
            self.tables.append(on_device, block_rows[:decode_rows], last, self.sinks, self.decode_ring, places)
            if self.deferred:
                self.tables.set_scores(places, torch.nan)
            self._plan_decode(decode_rows)
        prefill = tuple(
            self._place_chunk(request_ids[i], rows[i], query_starts[i], counts[i], lengths[i], block_rows[i : i + 1])
            for i in range(decode_rows, len(rows))
        )
        return Step(
            decode_rows,
            self._row_slot[:decode_rows],
            self._phase[:decode_rows],
            self._place[:padded_tokens],
            self._position[:padded_tokens],
            prefill,
            self._plan_prefill(prefill),
            protected_tokens(rows[decode_rows:], prefill, self._place[:padded_tokens]) if self.admitter else None,
        )

    def _prepare_selection(self, requests: Sequence[LiveRequest], lengths: Sequence[int], decode_rows: int) -> None:
        """What the decode rows of a step select from; padding rows follow the requests'."""
        if not decode_rows:
            return
        if self.page_selector:
            self.page_selector.prepare(requests, lengths, decode_rows)
        if self.selector:
            decoding = zip(requests, lengths, strict=True)
            selecting = [request if length > request.prefill_end else None for request, length in decoding]
            self.selector.prepare(selecting, decode_rows)

    def _note_cuts(
        self, rows: Sequence[LiveRequest], counts: Sequence[int], lengths: Sequence[int], block_rows: torch.Tensor
    ) -> None:
        """Remember which requests there is something to do for after this step, and what it computes of them."""
        if not self.policy.shares_budget:
            return
        for i, (request, count, length) in enumerate(zip(rows, counts, lengths, strict=True)):
            if isinstance(request.plan, SharedPlan):
                cuts = request.plan.cuts_of(request.prefill_end)
                cut = cuts.next(length - 1) == length
                if cut or (self.admitter and (count > 1 or cuts.protects(length - 1))):
                    request.row = block_rows[i : i + 1]
                    self._due.append((request, length - count, length))

    def _plan_prefill(self, rows: Sequence[PrefillRow]) -> Any:
        if self.policy.local is not None and rows and self.device.type == "cuda":
            return SparsePlan.of(rows, self.geometry, self.policy.local, self.flash, self.device)
        if self.flash and rows:
            return FlashPlan.of(rows, self.geometry.kv_heads, self.device)
        described = [(row.slot, row.tokens.start, row.end - row.start, row.start, row.stored) for row in rows]
        return ops.prefill_plan(described, self.device)

    def _plan_decode(self, rows: int) -> None:
        """Divide the work of the decode rows, once for all layers; their slots and lengths are final."""
        if self.decode_plan is not None and rows:
            assert self.tables is not None
            self.decode_plan.update(self._row_slot[:rows], self.tables.lengths)

    def end_step(self) -> None:
        """After the last layer: end the prompts that ended in a decode row, and check decoding ones for drift."""
        for request, length in self._decoding:
            if length > request.prefill_end:
                if self.retriever:
                    self.retriever.after_decode(request, length)
                continue
            if self.offloader:
                self.offloader.store_token(request, length - 1)
            if length == request.prefill_end:
                for layer in range(self.geometry.layers):
                    queries = self.windows.take_last(request.slot, layer, request.prefill_end)
                    self._end_prompt(request, layer, queries)
            elif length > request.prefill_end - self.policy.query_window:
                self.windows.keep_last(request.slot, length - 1, request.prefill_end)
        for request, start, length in self._due:
            if self.admitter:
                self.admitter.finish(request, start, length)
            elif self.cutter:
                self.cutter.cut(request, length)
        self._decoding, self._due = [], []
        self.in_step = False

    def _begin_decode(self, request: LiveRequest, length: int, row: int, block_rows: torch.Tensor) -> int:
        """Before a row of one token runs: land what is due. Returns the place of its query in the drift window, or
        among the newest ones.

        The row may be a prompt's: a chunk of one token.
        """
        if request.cut_at_end and (self.retriever or length <= request.prefill_end):
            self._decoding.append((request, length))
            if length <= request.prefill_end:
                request.row = block_rows[row : row + 1]
        if self.retriever is None:
            return (length - 1) % self.recent.window if self.recent.window else 0
        if length > request.prefill_end:
            self.retriever.before_decode(request, length)
        return (length - request.prompt_len - 1) % self.retriever.retrieval.window

    def _place_chunk(
        self, request_id: str, request: LiveRequest, first: int, count: int, end: int, row: torch.Tensor
    ) -> PrefillRow:
        assert self.tables is not None
        start, tokens = end - count, slice(first, first + count)
        request.row = row
        place = self.tables.extend(request.slot, row, start, end, self.sinks, self.ring_tokens)
        self._place[tokens] = place
        if self.gate:
            self._position[tokens] = torch.arange(start, end, device=self.device)
        if self.retriever and start >= request.prefill_end:  # behind a context
            self._decoding.append((request, end))
        finishing = request.cut_at_end and end == request.prefill_end
        stored = min(start, self.ring_tokens)
        return PrefillRow(request_id, request.slot, tokens, start, end, stored, finishing)

    def scores(self, layer: int, key: torch.Tensor, step: Step) -> torch.Tensor | None:
        """What the gate thinks of a layer's new tokens, float32 [tokens, KV heads]; None if it is not asked.

        A deferred gate is not asked for rows of one token, whose scores are NaN; no gate in steps that need no scores.
        """
        unasked = step.decode_rows if self.deferred else 0
        if self.gate is None or not self.gate_asked or (unasked and not step.prefill):
            return None
        projected = None if self.projected is None else self.projected[unasked : len(key)]
        scores = self.gate.score(layer, key[unasked:], step.position[unasked:], projected)
        if unasked:
            scores = torch.nn.functional.pad(scores, (0, 0, unasked, 0), value=torch.nan)
        return scores if step.protected is None else scores.masked_fill(step.protected[:, None], torch.inf)

    def record_decodes(self, step: Step, layer: int, query: torch.Tensor) -> None:
        """Keep what scorers and drift checks need of the decode rows' queries. Safe inside a captured graph."""
        self.windows.record_decodes(step.row_slot, layer, query)
        self.recent.record_decodes(step.row_slot, step.phase, layer, query)
        if self.pivots:
            self.pivots.record(step.row_slot, step.phase, layer, query)

    def finish_layer(
        self, row: PrefillRow, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """After a layer's attention of a prompt chunk: offload it, and keep the last queries or cut the prompt.

        Behind a context nothing of that is left to do, but pivots are watched.
        """
        request = self.live[row.request_id]
        self.recent.record_chunk(row.slot, row.end, layer, query)
        if not request.cut_at_end:
            return
        if row.start >= request.prefill_end:
            if self.pivots:
                self.pivots.record_chunk(row.slot, row.end - request.prompt_len, layer, query)
            return
        if self.offloader:
            self.offloader.store(request, layer, row.start, key, value)
        if not row.finishing:
            self.windows.keep(row.slot, layer, query, row.start, request.prefill_end)
            return
        self._end_prompt(request, layer, self.windows.take(row.slot, layer, query, row.start, row.end))

    def _end_prompt(self, request: LiveRequest, layer: int, queries: torch.Tensor) -> None:
        """One layer of a complete prompt: score and compact; after the last layer, give pages back."""
        if self.selector and request.selected:
            self.selector.end_prompt(request, layer)
            return
        if self.retriever:
            self.retriever.prompt_done(request, layer, queries[-1])
        self.prompt_end.compact_layer(request, layer, queries)
        if layer == self.geometry.layers - 1:
            self.prompt_end.give_back(request)
            self.windows.drop(request.slot)

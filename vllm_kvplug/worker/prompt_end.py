"""The end of a prompt: score its tokens, keep each head's best, give pages back.

Works layer by layer, right after the layer's attention, so that no scores outlive their layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_kvplug.components.allocators import in_order, top_shared, top_tokens
from vllm_kvplug.cuts import own_tokens
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import LayerPlan, PagePlan
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.worker.requests import LiveRequest, upload

if TYPE_CHECKING:
    from vllm_kvplug.memory import Geometry


class PromptEnd:
    """Scores, compacts and shrinks completed prompts."""

    def __init__(self, geometry: Geometry, pool: PagePool, tables: PageTables):
        self.geometry, self.pool, self.tables = geometry, pool, tables
        self._shared: dict[int, list[torch.Tensor]] = {}
        """By slot, where heads share: what those of every layer that was compacted keep, int64 [KV heads]."""

    def budgets(self, request: LiveRequest) -> list[list[int]]:
        """Tokens each head of this rank keeps, [layers][KV heads of the rank]; where they share, an even part of it."""
        heads, plan = self.geometry.head_range, request.plan
        assert isinstance(plan, PagePlan)
        return [list(layer[heads.start : heads.stop]) for layer in plan.kept(request.prefill_end)]

    def compact_layer(self, request: LiveRequest, layer: int, queries: torch.Tensor) -> None:
        """Move the tokens that each head of a layer keeps to its front, in their order.

        queries [window, query heads, d]: the prompt's last queries. Heads that keep everything stay as they are.
        """
        length, budgets = request.prefill_end, self.budgets(request)[layer]
        cut = [h for h, budget in enumerate(budgets) if budget < length]
        shared = isinstance(request.plan, LayerPlan)
        if cut and not shared:
            stored, scores = self._scored(request, layer, queries)
            which, kept = upload(torch.tensor([cut, [budgets[h] for h in cut]]), scores.device)
            self._compact(stored[which], top_tokens(scores[which], kept, max(budgets[h] for h in cut)))
        if shared:
            kept = self._compact_shared(request, layer, queries, sum(budgets)) if cut else self._all(length)
            self._shared.setdefault(request.slot, []).append(kept)

    def _compact_shared(self, request: LiveRequest, layer: int, queries: torch.Tensor, together: int) -> torch.Tensor:
        """As `compact_layer`, for heads that keep so many tokens together. Returns how many each keeps."""
        stored, scores = self._scored(request, layer, queries)
        own = own_tokens(request.policy.options.protected(request.prefill_end), together, len(scores))
        chosen, kept = in_order(top_shared(scores, self._all(together)[:1], own))
        self._compact(stored, chosen)
        return kept

    def _all(self, count: int) -> torch.Tensor:
        """The same number for every head of a layer, int64."""
        return torch.full((self.geometry.kv_heads,), count, device=self.tables.lengths.device)

    def _scored(self, request: LiveRequest, layer: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token slots of a layer's heads and their scores, protected tokens before all others, [KV heads, tokens]."""
        g, device = self.geometry, self.tables.lengths.device
        heads = torch.arange(layer * g.kv_heads, (layer + 1) * g.kv_heads, device=device)
        stored = self.tables.locate(request.slot, heads[:, None], torch.arange(request.prefill_end, device=device))
        keys, values = self.pool.gather(stored)
        scores = request.policy.score(PromptView(queries, keys, layer, g.head_range, g.scale, values))
        if request.policy.options.protect:
            scores = scores.clamp(max=torch.finfo(scores.dtype).max)  # a copy, and nothing ties with what follows
        for start, end in request.policy.options.protect:
            scores[:, start:end] = torch.inf
        return stored, scores

    def _compact(self, stored: torch.Tensor, chosen: torch.Tensor) -> None:
        """Move tokens of heads, `chosen` among `stored`, to the front; what is behind stays where it is."""
        target = stored[:, : chosen.shape[1]]
        self.pool.copy_tokens(stored.gather(1, chosen).flatten(), target.flatten())
        self.tables.set_positions(target, chosen)

    def give_back(self, request: LiveRequest) -> None:
        """After the last layer: pack the kept pages into the blocks that stay."""
        length = request.prefill_end
        before, after = request.plan.held(length, length)
        if request.slot in self._shared:
            kept, longest = torch.cat(self._shared.pop(request.slot)), length
        else:
            counts = [count for layer in self.budgets(request) for count in layer]
            kept, longest = upload(counts, self.tables.lengths.device), max(counts)
        assert request.row is not None
        self.pool.copy_pages(*self.tables.shrink(request.slot, request.row, kept, before, after, longest))


class QueryWindows:
    """The last queries of prompts whose last chunk does not hold all the queries a scorer wants.

    `last` holds the newest query of every slot, written by decode rows inside the captured graph: a
    prompt's last chunk may be one token. Earlier queries are kept per request while they are needed,
    which is from the chunk that enters the window to the one that ends the prompt.
    """

    def __init__(self, geometry: Geometry, window: int, device: torch.device):
        self.geometry, self.window = geometry, window
        self._kept: dict[int, torch.Tensor] = {}
        slots = geometry.max_requests + 1 if window else 0  # one more for padding rows
        shape = (slots, geometry.layers, geometry.query_heads, geometry.head_dim)
        self.last = torch.zeros(shape, dtype=geometry.dtype, device=device)

    def record_decodes(self, row_slot: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        """Keep the query of every decode row, [rows, query heads, d]. Safe inside a captured graph."""
        if self.window:
            self.last[row_slot, layer] = query  # slot -1 is the spare last entry

    def keep(self, slot: int, layer: int, query: torch.Tensor, start: int, prefill_end: int) -> None:
        """Keep the queries of a chunk [start, ...) that lie in the prompt's last window."""
        first = max(prefill_end - self.window, 0)
        end = start + query.shape[0]
        if end > first:
            begin = max(start, first)
            self._buffer(slot)[layer, begin - first : end - first] = query[begin - start :]

    def keep_last(self, slot: int, position: int, prefill_end: int) -> None:
        """As `keep`, for a one-token chunk at `position` that ran in a decode row; all layers."""
        first = max(prefill_end - self.window, 0)
        self._buffer(slot)[:, position - first] = self.last[slot]

    def take(self, slot: int, layer: int, query: torch.Tensor, start: int, prefill_end: int) -> torch.Tensor:
        """The window of a prompt whose last chunk starts at `start`, [window, query heads, d]."""
        first = max(prefill_end - self.window, 0)
        if not self.window:
            return query[:0]
        if start <= first:
            return query[first - start :]
        return torch.cat([self._kept[slot][layer, : start - first], query])

    def take_last(self, slot: int, layer: int, prefill_end: int) -> torch.Tensor:
        """As `take`, for a last chunk of one token that ran in a decode row."""
        newest = self.last[slot, layer][None] if self.window else self.last.new_empty((1, *self.last.shape[2:]))
        return self.take(slot, layer, newest, prefill_end - 1, prefill_end)

    def drop(self, slot: int) -> None:
        self._kept.pop(slot, None)

    def _buffer(self, slot: int) -> torch.Tensor:
        if slot not in self._kept:
            g = self.geometry
            shape = (g.layers, self.window, g.query_heads, g.head_dim)
            self._kept[slot] = torch.zeros(shape, dtype=g.dtype, device=self.last.device)
        return self._kept[slot]

"""One request that is cut, in page tables of its own, without an engine."""

from __future__ import annotations

import torch
from policy_tools import SHAPE

from vllm_kvplug.cuts import Cuts
from vllm_kvplug.lifecycle import Admission
from vllm_kvplug.memory import Geometry
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.placement.integrity import kept_positions
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.plan import SharedPlan, ceil_div
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.worker.cuts import Cutter
from vllm_kvplug.worker.requests import LiveRequest

UNBOUNDED = 1 << 30


class Request:
    """Every K and V holds its head and position; scores are given."""

    def __init__(self, cuts: Cuts, geometry: Geometry):
        self.heads, most = geometry.heads, geometry.max_tokens
        row = 2 * ceil_div(most, 16) + 2
        sizes = TableSizes(1, self.heads, most, row + 1, scored=True)
        self.tables = PageTables(sizes, "cpu")
        content = torch.zeros((row + 1) * self.heads, 16, 2 * geometry.head_dim, dtype=geometry.dtype)
        self.pool = PagePool(content)
        self.cutter = Cutter(geometry, self.pool, self.tables)
        policy = make_policy("knorm", {}, SHAPE)
        self.live = LiveRequest.admit(0, Admission(cuts.prefill_end, RequestOptions()), policy)
        self.live.plan = SharedPlan(SHAPE, lambda n: cuts)
        self.live.row = torch.arange(1, row + 1, dtype=torch.int32)[None]
        self.length = 0

    def come_to(self, length: int, scores: torch.Tensor) -> None:
        """scores [heads, new tokens]."""
        place = self.tables.extend(0, self.live.row, self.length, length, 0, UNBOUNDED)
        self.tables.set_scores(place, scores.T)
        content = torch.zeros(*place.shape, self.pool.pages.shape[-1])
        content[..., 0] = torch.arange(self.heads)
        content[..., 1] = torch.arange(self.length, length)[:, None]
        self.pool.put(place.flatten(), content.flatten(0, 1).to(self.pool.pages.dtype))
        self.length = length

    def cut(self) -> None:
        self.cutter.cut(self.live, self.length)

    def kept(self) -> list[list[int]]:
        """Positions of each head, checked to be those of what lies in its pages."""
        kept = kept_positions(self.tables, 0)
        for head, positions in enumerate(kept):
            where = self.tables.locate(0, head, torch.arange(len(positions)))
            content = self.pool.pages.view(-1, self.pool.pages.shape[-1])[where]
            assert content[:, 1].tolist() == positions and set(content[:, 0].tolist()) <= {head}
        return kept

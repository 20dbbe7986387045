"""The end of a prompt that goes to three places, whatever the gate says, and the memory it takes."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_tools import Request
from policy_tools import SHAPE
from test_memory import PeakMemory
from test_registry import save_sink_gate

from vllm_kvplug import memory
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.cuts import Cuts
from vllm_kvplug.gates.files import GateMetadata, WriteGateShape, save_gate
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.memory import Geometry
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.placement import pool
from vllm_kvplug.placement.integrity import check_integrity, kept_positions
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.selection import HostedPlan
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiers.codecs import Codec
from vllm_kvplug.tiers.host import HostPool
from vllm_kvplug.tiers.lane import Lane
from vllm_kvplug.worker.hosting import HostedSelector, HostingAdmitter, HostingCutter

CPU = torch.device("cpu")
ODD = torch.tensor([1, 3, 5])
NOTHING: Any = None


class HostedRequest(Request):
    """Under `fastkvzip+yakv`, with a host tier of its own. survivors: of every head, what the last cut kept."""

    def __init__(self, policy: Any, cuts: Cuts, geometry: Geometry, codec: Any):
        super().__init__(cuts, geometry)
        where = self.pool, self.tables
        host = HostPool(
            geometry.max_tokens // 64 + 1, Codec(codec, geometry.head_dim, geometry.dtype), False, self.heads
        )
        self.selector = HostedSelector(policy, geometry, *where, host, Lane(CPU))
        self.cutter = HostingCutter(geometry, *where, self.selector)
        self.live.plan = HostedPlan(policy.shape, lambda n: cuts, policy._selected, policy.landmark_pages.tokens)
        self.selector.begin(self.live)
        self.selector.lane.close()
        self.survivors: list[set[int]] = []
        self._judge, self.cutter._judge = self.cutter._judge, self._judged

    def _judged(self, live: Any, cut: int) -> torch.Tensor:
        lengths, before = self._judge(live, cut), self.tables.lengths[0].clone()
        self.tables.lengths[0] = lengths.int()
        self.survivors = [set(head) for head in kept_positions(self.tables, 0)]
        self.tables.lengths[0] = before
        return lengths

    def on_host(self) -> torch.Tensor:
        """K and V of what every head has there, [heads, tokens, 2 * head_dim]; as they were."""
        selected = self.live.selected
        number = torch.arange(selected.layout.landmarks)
        slot = selected.slots[number // 64] * self.heads + torch.arange(self.heads)[:, None]
        rows = slot * 64 + number % 64
        return self.selector.host.codec.decode(self.selector.host.rows[rows])


@pytest.mark.parametrize("score", [nan, -inf, inf, 0.0])
@pytest.mark.parametrize("protect", [(), ((0, 3), (140, 233), (390, 400))])
def test_every_token_is_somewhere_or_gone(score: float, protect: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """Every second head gives its first tokens one score, the others scores of their own; K names head and position."""
    shape = replace(SHAPE, page_itemsize=4)
    gate = str(save_sink_gate(tmp_path / "gate.safetensors", shape))
    knobs = {"gate": gate, "ratio": 0.2, "offload": 0.4, "fetch": 0.05, "cut_every": 160, "window": 20, "codec": "auto"}
    policy = make_policy("fastkvzip+yakv", knobs, shape).for_request(RequestOptions(protect=protect))
    cuts = policy._cuts_with_protected(400)
    geometry = Geometry.of_rank(shape, 0, torch.float32, max_requests=1, max_tokens=400)
    request = HostedRequest(policy, cuts, geometry, "auto")
    for length in (160, 320, 400):
        scores = torch.rand(request.heads, length - request.length)
        scores[::2, :50] = score
        request.come_to(length, scores)
        request.cut()
    layout, plan = request.live.selected.layout, request.live.plan
    assert layout == plan.layout(400) and layout.landmarks == cuts.guaranteed() > layout.selected == 20
    check_integrity(request.tables, {0: plan_blocks(request)})
    on_host, safe = request.on_host(), {t for a, b in (*protect, (400 - cuts.window, 400)) for t in range(a, b)}
    for head, kept in enumerate(kept_positions(request.tables, 0)):
        hosted = on_host[head, :, 1].tolist()
        assert (on_host[head, :, 0] == head).all() and hosted == sorted(set(hosted))
        stays = {t for t in kept if t < 400}
        assert stays | set(hosted) == request.survivors[head] and not stays & set(hosted) and safe <= stays
        assert [t - 400 for t in kept if t >= 400] == list(range(layout.landmarks - 20, layout.landmarks))
        where = request.tables.locate(0, head, torch.arange(20))
        assert torch.equal(request.pool.pages.view(-1, 64)[where], on_host[head, -20:])
    total = int(request.tables.lengths[0].sum())
    assert total == plan.kept_tokens(400) <= 16 * layout.token_blocks * request.heads
    if score == inf:  # the others' tokens yield, but for what they have to themselves
        assert int(request.tables.lengths[0, 1]) < int(request.tables.lengths[0, 0])


@pytest.mark.parametrize("cap", [0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_admission_takes_no_more_than_is_charged(
    cap: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the longest prompt, of which every head admits all that it may, or every second one nothing."""
    monkeypatch.setattr(pool, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "COPY_BYTES", 1 << 16)
    tokens = 3000
    shape = ModelShape(3, 2, 4, 64, rotary=(0.1,) * 32, page_itemsize=dtype.itemsize)
    metadata = GateMetadata(model=ProfiledModel.of_shape(shape), gate=WriteGateShape(hidden=8), source="test", date="-")
    save_gate(tmp_path / "gate.safetensors", WriteGate(3, 2, 64, 8), metadata)
    knobs = {"gate": str(tmp_path / "gate.safetensors"), "cap": cap, "tau": 0.5, "window": 32, "sinks": 3}
    policy = make_policy("wgkv+yakv", knobs, shape)
    geometry = Geometry.of_rank(shape, 0, dtype, max_requests=1, max_tokens=tokens)
    for scores in (torch.ones(geometry.heads, 1000), torch.ones(geometry.heads, 1000).index_fill(0, ODD, 0)):
        request = Request(policy.cuts(tokens), geometry)
        where = request.pool, request.tables
        host = HostPool(48, Codec("higgs4", 64, dtype), False, request.heads)
        selector = HostedSelector(policy, geometry, *where, host, Lane(CPU))
        admitter = HostingAdmitter(geometry, *where, policy.local, NOTHING, NOTHING, selector)
        request.live.policy, request.live.plan = policy, policy.plan()
        selector.begin(request.live)
        selector.lane.close()
        for length in (1000, 2000, 3000):
            request.come_to(length, scores)
            with torch.inference_mode(), PeakMemory() as peak:
                admitter.finish(request.live, length - 1000, length)
        hosted = int(cap * (tokens - 32 - 3))
        admitted = torch.where(scores[:, 0] > 0, hosted, 0)
        assert selector.layouts[0, :, 2].equal(admitted)
        assert request.tables.lengths[0].equal(35 + policy.plan().chosen.of_heads(admitted).int())
        charged = memory.workspace_bytes(policy, geometry, True)
        assert peak.most <= charged
        check_integrity(request.tables, {0: request.live.row[0].tolist()})
        selector.prepare([request.live], 1)
        with torch.inference_mode(), PeakMemory() as selecting:
            selector.select(torch.zeros(1, dtype=torch.int32), 0, torch.randn(1, 4, 64).to(dtype))
        assert selecting.most <= memory.selecting_bytes(policy, geometry, False)


def plan_blocks(request: Request) -> list[int]:
    """Blocks that the plan leaves the request."""
    plan, end = request.live.plan, request.live.prefill_end
    left = plan.held(end, end)[1]
    tables = request.tables
    landmarks = request.selector.blocks[0, : request.live.selected.layout.landmark_blocks].tolist()
    tokens = tables._left[0, : request.live.selected.layout.token_blocks].tolist()
    assert len(set(tokens + landmarks)) == left
    return tokens + landmarks


@pytest.mark.parametrize("offload", [0.1, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_takes_no_more_than_is_charged(
    offload: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "COPY_BYTES", 1 << 16)
    tokens, shape = 3000, ModelShape(3, 2, 4, 64, page_itemsize=dtype.itemsize)
    gate = str(save_sink_gate(tmp_path / "gate.safetensors", shape))
    policy = make_policy("fastkvzip+yakv", {"gate": gate, "offload": offload, "cut_every": 1000}, shape)
    geometry = Geometry.of_rank(shape, 0, dtype, max_requests=1, max_tokens=tokens)
    request = HostedRequest(policy, policy.cuts(tokens), geometry, "higgs4")
    for length in (1000, 2000, 3000):
        request.come_to(length, torch.rand(geometry.heads, 1000))
        with torch.inference_mode(), PeakMemory() as peak:
            request.cut()
    charged = memory.hosting_bytes(policy, geometry)
    assert 0.3 * charged <= peak.most <= max(charged, memory.judging_bytes(policy, geometry))
    request.selector.prepare([request.live], 1)
    with torch.inference_mode(), PeakMemory() as selecting:
        request.selector.select(torch.zeros(1, dtype=torch.int32), 0, torch.randn(1, 4, 64).to(dtype))
    charged = memory.selecting_bytes(policy, geometry, False)
    assert selecting.most <= charged <= memory.workspace_bytes(policy, geometry, False)

"""What start-up charges for queries, plans and staging is what their tensors take."""

from __future__ import annotations

import weakref
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cut_tools import Request
from policy_tools import SHAPE, heterocache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm_kvplug.kernels.hopper import HopperPlan

from vllm_kvplug import memory
from vllm_kvplug.calibrate.profile import ProfiledModel
from vllm_kvplug.components.scorers import stored_votes
from vllm_kvplug.cuts import Cuts, DecodeCuts
from vllm_kvplug.gates.files import GateMetadata, SinkGateShape, WriteGateShape, save_gate
from vllm_kvplug.lifecycle import Admission
from vllm_kvplug.memory import Charges, Geometry
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.placement import pool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.plan import SharedPlan, ceil_div
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.heterocache import HeteroCache
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.tiers.codecs import Codec
from vllm_kvplug.tiers.host import HostPool, Staging
from vllm_kvplug.tiers.lane import Lane
from vllm_kvplug.worker.drift import PivotQueries
from vllm_kvplug.worker.prompt_end import QueryWindows
from vllm_kvplug.worker.recent import RecentQueries
from vllm_kvplug.worker.requests import LiveRequest
from vllm_kvplug.worker.retrieval import Retriever, Tiers

CPU = torch.device("cpu")
GEOMETRY = Geometry.of_rank(SHAPE, 0, torch.bfloat16, max_requests=7, max_tokens=5000)


def taken(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_geometry_of_a_rank():
    """12 query heads on 6 KV heads, two ranks: the second holds KV heads 3 to 5."""
    geometry = Geometry.of_rank(replace(SHAPE, tensor_parallel=2), 1, torch.float32, 7, 5000)
    assert (geometry.kv_heads, geometry.query_heads, geometry.head_range) == (3, 6, range(3, 6))
    assert geometry.block_bytes == 16 * 2 * 32 * 4 * (2 * 3)


@pytest.mark.parametrize("window", [0, 1, 9])
def test_query_windows(window: int):
    windows = QueryWindows(GEOMETRY, window, CPU)
    for slot in range(memory.SPLIT_WINDOWS if window else 0):
        windows._buffer(slot)
    assert memory.query_window_bytes(window, GEOMETRY) == taken(windows.last, *windows._kept.values())


@pytest.mark.parametrize("window", [0, 8])
def test_recent_queries(window: int):
    assert memory.recent_query_bytes(window, GEOMETRY) == taken(RecentQueries(GEOMETRY, window, CPU)._kept)


def test_pivot_queries(tmp_path: Path):
    """Layer 0 has two pivots and layer 1 one; without retrieval nothing is kept."""
    policy = heterocache(tmp_path, rho=0.6)
    pivots = PivotQueries(policy.retrieval, GEOMETRY, CPU)
    assert memory.pivot_bytes(policy, GEOMETRY) == taken(pivots.recent, pivots.base) > 0
    off = heterocache(tmp_path, rho=0.6, host_gib=0)
    assert memory.pivot_bytes(off, GEOMETRY) == memory.staging_tokens(off, GEOMETRY) == 0


def test_staging_holds_all_clusters_and_the_largest_twice(tmp_path: Path):
    policy = heterocache(tmp_path, rho=0.6)
    kept = policy.plan().kept(5000)
    clusters = [kept[0][0] + kept[0][2], kept[0][3] + kept[0][5], kept[1][1] + kept[1][3]]
    assert memory.staging_tokens(policy, GEOMETRY) == sum(clusters)
    second = Geometry.of_rank(replace(SHAPE, tensor_parallel=2), 1, torch.bfloat16, 7, 5000)
    parts = [kept[0][3] + kept[0][5], kept[1][3]]
    assert memory.staging_tokens(policy, second) == max(sum(parts), 2 * max(parts))


def test_decode_plan():
    g = GEOMETRY
    plan = HopperPlan(19, g.layers, g.kv_heads, g.query_heads, g.head_dim, CPU, blocks=132)
    assert memory.decode_plan_bytes(g, 19, 132) == plan.nbytes
    tensors = (plan.parts, plan.starts, plan.partial, plan.sums, plan.arrived)
    assert plan.nbytes == taken(*tensors)


def test_the_charge_grows_with_what_it_is_for():
    policy = make_policy("snapkv", {"ratio": 0.5, "window": 32}, SHAPE)
    base = memory.charges(policy, GEOMETRY, max_batch=100, plan_bytes=0)
    assert base.fixed == base.tables + base.queries + base.staging + base.workspace
    with_plan = memory.charges(policy, GEOMETRY, 100, plan_bytes=4321)
    assert with_plan.tables - base.tables == 4321
    wider = memory.charges(policy, GEOMETRY, 164, plan_bytes=0)
    assert wider.tables - base.tables == 8 * 64 * GEOMETRY.heads
    streaming = memory.charges(make_policy("streaming", {}, SHAPE), GEOMETRY, 100, plan_bytes=0)
    assert streaming.queries == streaming.staging == 0 and streaming.workspace < base.workspace


def test_a_pool_and_its_tables_fill_what_is_there():
    charged = Charges(tables=100, queries=20, staging=3, workspace=7, per_block=10)
    pool = charged.pool_bytes(available=11_130, block_bytes=100)
    assert pool == 10_000 and pool + pool // 100 * 10 + 130 == 11_130
    assert charged.pool_bytes(available=100, block_bytes=100) < 0


# ------------------------------------------------------------------------------------------ cuts


class PeakMemory(TorchDispatchMode):
    """Most bytes of tensors that were made inside and alive at once; what an op takes for itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs)
        for storage in {t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)}:
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._known:
                continue
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


DECODE = DecodeCuts(128, 256, 4, 128)


@pytest.mark.parametrize(
    "cuts",
    [
        Cuts(2000, 400, 64, Fraction(1, 3)),
        Cuts(2000, 400, 64, Fraction(49, 50)),
        Cuts(2000, 3000, 1, Fraction(1, 10)),
        Cuts(1100, 3000, 1, Fraction(9, 10), DECODE),
        Cuts(1100, 3000, 1, Fraction(9, 10), DECODE, allocation="layer"),
        Cuts(1100, 3000, 1, Fraction(9, 10), DECODE, allocation="uniform"),
    ],
)
@pytest.mark.parametrize("head_dim", [2, 128])
def test_cuts_take_no_more_than_is_charged(cuts: Cuts, head_dim: int, monkeypatch: pytest.MonkeyPatch):
    """And not much less. The charge has room for what sorting takes on a GPU, 12 bytes a token."""
    monkeypatch.setattr(pool, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "COPY_BYTES", 1 << 16)
    shape = replace(SHAPE, head_dim=head_dim)
    geometry = Geometry.of_rank(shape, 0, torch.float32, max_requests=1, max_tokens=2048)
    config = SimpleNamespace(request_knob=None)
    policy = SimpleNamespace(cuts=lambda n: cuts, shares_budget=True, gated=True, query_window=0, config=config)
    request, most = Request(cuts, geometry), 0
    for length in SharedPlan(shape, lambda n: cuts).cuts(cuts.prefill_end, 0, 2048):
        request.come_to(length, torch.rand(geometry.heads, length - request.length))
        with PeakMemory() as peak:
            request.cut()
        most = max(most, peak.most)
    charged = max(memory.judging_bytes(policy, geometry), memory.packing_bytes(geometry))
    assert 0.4 * charged <= most <= charged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["wgkv", "fastkvzip"])
def test_gates_take_no_more_than_is_charged(kind: str, dtype: torch.dtype, tmp_path: Path):
    shape = replace(SHAPE, rotary=(0.5,) * (SHAPE.head_dim // 2))
    size = WriteGateShape(hidden=64) if kind == "wgkv" else SinkGateShape(hidden_size=48)
    metadata = GateMetadata(model=ProfiledModel.of_shape(shape), gate=size, source="test", date="-")
    save_gate(tmp_path / "gate.safetensors", metadata.empty_gate(), metadata)
    policy = make_policy(kind, {"gate": str(tmp_path / "gate.safetensors")}, shape)
    heads, tokens = shape.kv_heads, 500
    gate = policy.make_gate(range(heads), dtype, CPU)
    key = torch.randn(tokens, heads, shape.head_dim, dtype=dtype)
    projected = torch.randn(tokens, policy.gate_columns(heads), dtype=dtype)
    with torch.inference_mode(), PeakMemory() as peak:
        gate.score(1, key, torch.arange(tokens), projected)
    charged = tokens * policy.gate_scratch(heads, dtype.itemsize, cuda=False)
    assert 0.3 * charged <= peak.most <= charged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scoring_at_cuts_takes_no_more_than_is_charged(dtype: torch.dtype):
    policy, tokens = make_policy("rkv", {}, SHAPE), 1500
    queries = torch.randn(8, SHAPE.query_heads, SHAPE.head_dim, dtype=dtype)
    keys = torch.randn(SHAPE.kv_heads, tokens, SHAPE.head_dim, dtype=dtype)
    view = PromptView(queries, keys, 0, range(SHAPE.kv_heads), 1.0, keys)
    with torch.inference_mode(), PeakMemory() as peak:
        policy.score(view)
    charged = tokens * SHAPE.kv_heads * memory.scoring_bytes(SHAPE.head_dim)
    assert 0.4 * charged <= peak.most <= charged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_votes_take_no_more_than_is_charged(dtype: torch.dtype):
    """The charge is that of a policy that also compares keys with each other."""
    tokens = 1500
    queries = torch.randn(32, SHAPE.query_heads, SHAPE.head_dim, dtype=dtype)
    keys = torch.randn(SHAPE.kv_heads, tokens, SHAPE.head_dim, dtype=dtype)
    with torch.inference_mode(), PeakMemory() as peak:
        stored_votes(queries, keys, torch.full((SHAPE.kv_heads,), tokens - 3), 1.0, 5)
    assert 0 < peak.most <= tokens * SHAPE.kv_heads * memory.scoring_bytes(SHAPE.head_dim)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_packing_takes_no_more_than_is_charged(share: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "COPY_BYTES", 1 << 16)
    geometry = Geometry.of_rank(SHAPE, 0, torch.float32, max_requests=1, max_tokens=2048)
    request = Request(Cuts(2048, 2048, 1, Fraction(1)), geometry)
    request.come_to(2048, torch.zeros(geometry.heads, 2048))
    kept = torch.full((geometry.heads,), int(share * 2048))
    with PeakMemory() as peak:
        pairs = request.tables.shrink(0, request.live.row, kept, 128, ceil_div(int(share * 2048), 16), 2048)
        request.pool.copy_pages(*pairs)
    charged = memory.packing_bytes(geometry)
    assert 0.4 * charged <= peak.most <= charged


@pytest.mark.parametrize("at_once", [1, 3])
def test_retrieval_takes_no_more_than_is_charged(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A check of all pivots, at the longest prompt, after which all satellites fetch."""
    policy, geometry = heterocache(tmp_path, rho=0.6, tau_drift=1.0), replace(GEOMETRY, max_requests=1, max_tokens=2000)
    compared = memory._compared_bytes(geometry, 5) * 2000
    monkeypatch.setattr(memory, "COMPARED_BYTES", at_once * compared)
    retriever = Retriever(policy.retrieval, geometry, *retrieval_rooms(policy, geometry))
    request = LiveRequest.admit(0, Admission(2000, RequestOptions()), policy)
    retriever.begin(request)
    rows = torch.arange(1, 128, dtype=torch.int32)[None]
    retriever.tables.extend(0, rows, 0, 2000, 0, 1 << 30)
    retriever.queries.recent.normal_()
    with torch.inference_mode(), PeakMemory() as peak:
        retriever.after_decode(request, 2005)
        retriever._conclude(request, request.offloaded.check)
    assert len(request.offloaded.in_flight) == 3
    retriever.lane.close()
    charged = memory.drift_bytes(policy, geometry)
    assert 0.3 * charged <= peak.most <= charged


def retrieval_rooms(policy: HeteroCache, geometry: Geometry) -> tuple[PivotQueries, pool.PagePool, PageTables, Tiers]:
    sizes = geometry.table_sizes(128, policy)
    pages = torch.randn(128 * geometry.heads, 16, 2 * geometry.head_dim).to(geometry.dtype)
    host = HostPool(policy.host_capacity(2), Codec("auto", geometry.head_dim, geometry.dtype), pin=False)
    staging = Staging(memory.staging_tokens(policy, geometry), geometry.head_dim, geometry.dtype, CPU)
    tiers = Tiers(host, staging, Lane(CPU), None)
    return PivotQueries(policy.retrieval, geometry, CPU), pool.PagePool(pages), PageTables(sizes, CPU), tiers


def test_windows_of_larger_budgets_are_charged():
    """At ratio 0.001 the window is small; a request may ask for more of its prompt, and has the whole window then."""
    policy = make_policy("knorm", {"ratio": 0.001, "window": 1000, "cut_every": 64}, SHAPE)
    assert policy.cuts(5000).window == 5
    one = GEOMETRY.heads * memory.JUDGED_BYTES + GEOMETRY.kv_heads * 2 * 32 * 2
    assert memory.judging_bytes(policy, GEOMETRY) == 1064 * one
    modest = make_policy("knorm", {"ratio": 0.001, "window": 1000, "cut_every": 64, "max_request_budget": 0.1}, SHAPE)
    assert memory.judging_bytes(modest, GEOMETRY) == 564 * one
    assert memory.judging_bytes(make_policy("snapkv", {}, SHAPE), GEOMETRY) == 0


def test_pages_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch):
    pages = torch.arange(40.0)[:, None, None].expand(40, 16, 4).clone()
    monkeypatch.setattr(pool, "COPY_BYTES", 3 * 16 * 4 * 4 + 5)  # three pages
    order = torch.randperm(20)
    pool.PagePool(pages).copy_pages(order, torch.arange(20, 40))
    assert pages[20:, 3, 1].tolist() == order.tolist() and pages[:20, 0, 0].tolist() == list(range(20))
    pool.PagePool(pages).copy_pages(order[:0], order[:0])

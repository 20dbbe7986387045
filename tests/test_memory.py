"""What start-up charges for queries, plans and staging is what their tensors take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from policy_tools import SHAPE, heterocache

from vllm_kvplug import memory
from vllm_kvplug.memory import Charges, Geometry
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.worker.drift import PivotQueries
from vllm_kvplug.worker.prompt_end import QueryWindows

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


def test_pivot_queries(tmp_path: Path):
    """Layer 0 has two pivots and layer 1 one; without retrieval nothing is kept."""
    policy = heterocache(tmp_path, rho=0.6)
    pivots = PivotQueries(policy.retrieval, GEOMETRY, CPU)
    assert memory.pivot_bytes(policy, GEOMETRY) == taken(pivots.recent, pivots.base) > 0
    off = heterocache(tmp_path, rho=0.6, host_gib=0)
    assert memory.pivot_bytes(off, GEOMETRY) == memory.staging_tokens(off, GEOMETRY) == 0


def test_staging_holds_the_largest_cluster_twice(tmp_path: Path):
    policy = heterocache(tmp_path, rho=0.6)
    kept = policy.plan().kept(5000)
    clusters = [kept[0][0] + kept[0][2], kept[0][3] + kept[0][5], kept[1][1] + kept[1][3]]
    assert memory.staging_tokens(policy, GEOMETRY) == 2 * max(clusters)
    second = Geometry.of_rank(replace(SHAPE, tensor_parallel=2), 1, torch.bfloat16, 7, 5000)
    assert memory.staging_tokens(policy, second) == 2 * max(kept[0][3] + kept[0][5], kept[1][3])


def test_decode_plan():
    decode = pytest.importorskip("vllm_kvplug.kernels.decode_attention")
    g = GEOMETRY
    plan = decode.DecodePlan(19, g.layers, g.kv_heads, g.query_heads, g.head_dim, CPU)
    tensors = (plan.starts, plan.split_log2, plan.work, plan.partial, plan.sums)
    assert memory.decode_plan_bytes(g, 19, plan.capacity) == taken(*tensors)


def test_the_charge_grows_with_what_it_is_for():
    policy = make_policy("snapkv", {"ratio": 0.5, "window": 32}, SHAPE)
    base = memory.charges(policy, GEOMETRY, max_batch=100, max_rows=7, programs=0)
    assert base.fixed == base.tables + base.queries + base.staging + base.workspace
    with_plan = memory.charges(policy, GEOMETRY, 100, 7, programs=64)
    assert with_plan.tables - base.tables == memory.decode_plan_bytes(GEOMETRY, 7, 64)
    wider = memory.charges(policy, GEOMETRY, 164, 7, programs=0)
    assert wider.tables - base.tables == 8 * 64 * GEOMETRY.heads
    streaming = memory.charges(make_policy("streaming", {}, SHAPE), GEOMETRY, 100, 7, programs=0)
    assert streaming.queries == streaming.staging == 0 and streaming.workspace < base.workspace


def test_a_pool_and_its_tables_fill_what_is_there():
    charged = Charges(tables=100, queries=20, staging=3, workspace=7, per_block=10)
    pool = charged.pool_bytes(available=11_130, block_bytes=100)
    assert pool == 10_000 and pool + pool // 100 * 10 + 130 == 11_130
    assert charged.pool_bytes(available=100, block_bytes=100) < 0

"""A short soak; `python -m benchmarks.soak` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_tools import one_thread  # noqa: F401

from benchmarks.engine import runtime
from benchmarks.soak import Poison, soak, soaked_engine


@pytest.mark.parametrize("policy", ["heterocache", "yakv", "fastkvzip+yakv", "wgkv+yakv"])
def test_soak(policy: str) -> None:
    metrics, mismatched = soak(80, 4, policy)
    found = {name.removeprefix("soak."): value for name, value in metrics.items()}
    assert mismatched == []
    assert found["mismatched_requests"] == found["freed_page_writes"] == 0
    assert {name: count for name, count in found.items() if name.startswith("leaked") and count} == {}
    # Or else the run shows nothing.
    assert found["completed"] > 40 and found["refused"] > 5
    drift = ("triggers", "landings") if policy == "heterocache" else ()
    for name in ("preemptions", "waits_for_host", *drift):
        assert found[name] > 0, name


def test_poison_sees_a_write_to_a_freed_page(tmp_path: Path) -> None:
    from benchmarks.drift_model import make_model

    limits = {"host_gib": 0.01, "max_num_seqs": 2, "num_gpu_blocks_override": 112}
    with soaked_engine(make_model(tmp_path), "heterocache", **limits) as llm:
        poison, pool = Poison(llm), runtime(llm).pool
        poison.check()
        poison.check()
        assert poison.writes == 0
        pool.put(torch.tensor([5 * poison.heads * 16]), torch.zeros(1, 64))
        poison.check()
        assert poison.writes == 1

"""Forecasts agree with engines, and with what can be counted by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import (
    Ask,
    one_thread,  # noqa: F401
    runtime,
    scheduler,
    serve,
    tiny_engine,
    token_ids,
)

from benchmarks.drift_model import make_model, write_profile
from benchmarks.engine import used_blocks
from vllm_kvplug import planning
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.tiny import random_gate

SHAPE = ModelShape(layers=3, kv_heads=2, query_heads=4, head_dim=32)
BLOCK = 16 * 2 * 32 * 4 * (3 * 2)  # float32
CONTEXT, PROMPT, MOST = 512, 508, 4096
ENGINE = planning.Engine(SHAPE, torch.float32, max_requests=8, max_batch=256, multiprocessors=0)
AVAILABLE = 200 * BLOCK + BLOCK // 2


# ------------------------------------------------------------------------------------------ beside an engine


@dataclass
class Seen:
    """What an engine said and did with one request: blocks held after each step."""

    blocks: int
    fixed: int
    block_bytes: int
    concurrency: float
    held: list[int]


@pytest.fixture
def no_legacy_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that other engines of this process use comes before kv_cache_memory_bytes."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def watch(model: Path, **arguments: Any) -> Seen:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    with tiny_engine(model, max_model_len=CONTEXT, kv_cache_memory_bytes=AVAILABLE, **arguments) as llm:
        config, held = scheduler(llm).kv_cache_config, []
        serve(llm, [Ask(token_ids(PROMPT), CONTEXT - PROMPT)], lambda: held.append(used_blocks(llm)))
        return Seen(
            config.num_blocks,
            runtime(llm).charges.fixed,
            sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in config.kv_cache_groups),
            get_max_concurrency_for_kv_cache_config(scheduler(llm).vllm_config, config),
            held,
        )


KNOBS: Mapping[str, Mapping[str, Any]] = {
    "streaming": {"window": 124},
    "snapkv": {"ratio": 0.3},
    "heterocache": {"rho": 0.6, "host_gib": 0.05},
    "yakv": {"ratio": 0.1, "local": 16, "host_gib": 0.05},
    "fastkvzip+yakv": {"ratio": 0.2, "offload": 0.4, "cut_every": 128, "host_gib": 0.05},
    "wgkv+yakv": {"tau": 0.5, "window": 32, "cut_every": 128, "host_gib": 0.05},
    "quest": {"ratio": 0.1},
}


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.usefixtures("no_legacy_size")
def test_an_engine_does_what_was_foretold(name: str, tiny_model_dir: Path, tmp_path: Path):
    """Stock's forecast is for its blocks on CUDA; on the CPU they are larger."""
    model, knobs = tiny_model_dir, dict(KNOBS[name])
    if name == "heterocache":
        model = make_model(tmp_path)
        knobs["profile"] = str(write_profile(model, tmp_path / "profile.json"))
    if name in ("fastkvzip+yakv", "wgkv+yakv"):
        knobs["gate"] = str(random_gate(model, tmp_path / "gate.safetensors", name.partition("+")[0]))
    engine = replace(ENGINE, shape=planning.model_shape(planning.model_config(str(model)), "tiny", 1, 4))
    policy = make_policy(name, knobs, engine.shape)
    told = planning.forecast(policy, engine, CONTEXT, MOST, AVAILABLE)
    asked = planning.forecast(policy, engine, PROMPT, MOST, AVAILABLE)
    seen = watch(model, kv_policy=name, kv_policy_config=knobs)
    assert seen.block_bytes == told.block_bytes
    assert seen.blocks == told.blocks and seen.fixed == told.charges.fixed
    assert seen.concurrency == pytest.approx(told.max_concurrency)
    assert max(seen.held) == asked.prompt_blocks
    assert asked.decode_blocks in seen.held
    assert (asked.decode_blocks < asked.prompt_blocks) == (name not in ("streaming", "quest"))


# ------------------------------------------------------------------------------------------ by hand


def test_stock():
    """200 blocks, one of them null; a request of 512 tokens holds 32 of them."""
    told = planning.forecast(None, ENGINE, CONTEXT, MOST, AVAILABLE)
    assert (told.blocks, told.block_bytes, told.table_bytes) == (200, BLOCK, 0)
    assert (told.prompt_blocks, told.decode_blocks) == (32, 32)
    assert told.prompts == told.decoding == 199 // 32
    assert told.max_concurrency == 200 / 32
    assert told.longest == 199 * 16


def test_no_more_requests_than_allowed():
    told = planning.forecast(None, replace(ENGINE, max_requests=3), CONTEXT, MOST, AVAILABLE)
    assert told.prompts == told.decoding == 3


def test_decoding_leaves_room_for_one_prompt():
    """At half the prompt, requests come one after another: the last needs 32 blocks beside the others' 16."""
    policy = make_policy("snapkv", {"ratio": 0.5}, SHAPE)
    engine = replace(ENGINE, max_requests=99)
    told = planning.forecast(policy, engine, CONTEXT, MOST, AVAILABLE)
    assert (told.prompt_blocks, told.decode_blocks) == (32, 16)
    usable = told.blocks - 1
    assert told.decoding == 1 + (usable - 32) // 16
    assert 32 + 16 * (told.decoding - 1) <= usable < 32 + 16 * told.decoding
    none = planning.forecast(policy, engine, CONTEXT, MOST, told.charges.fixed + 30 * (BLOCK + told.charges.per_block))
    assert none.prompts == none.decoding == 0 and 0 < none.longest < CONTEXT


def test_the_longest_request_pays_for_its_own_tables():
    policy = make_policy("snapkv", {"ratio": 0.5}, SHAPE)
    told = planning.forecast(policy, ENGINE, CONTEXT, MOST, AVAILABLE)
    assert CONTEXT < told.longest < MOST
    at = planning.forecast(policy, ENGINE, told.longest, MOST, AVAILABLE)
    beyond = planning.forecast(policy, ENGINE, told.longest + 1, MOST, AVAILABLE)
    assert at.prompts == 1 and beyond.prompts == 0
    ring = make_policy("streaming", {"window": 60}, SHAPE)
    assert planning.forecast(ring, ENGINE, CONTEXT, MOST, AVAILABLE).longest == MOST


def test_the_host_tier_is_a_limit(tmp_path: Path):
    from policy_tools import SHAPE as DRIFTING
    from policy_tools import SLOT_GIB, heterocache

    policy = heterocache(tmp_path, rho=0.6, host_gib=100.5 * SLOT_GIB)
    engine = replace(ENGINE, shape=DRIFTING, max_requests=99)
    told = planning.forecast(policy, engine, CONTEXT, MOST, 1 << 30)
    slots = 6 * 512 // 64  # satellites, and 64 tokens of one in a slot
    assert told.host_bytes == slots * 64 * 2 * 32 * 4 and told.host_total_bytes == 100 * 64 * 2 * 32 * 4
    assert told.prompts == told.decoding == 100 // slots
    assert told.longest // 64 == 100 // 6
    off = heterocache(tmp_path, rho=0.6, host_gib=0)
    assert planning.forecast(off, engine, CONTEXT, MOST, 1 << 30).host_bytes == 0


def test_tensor_parallel_ranks():
    """Two ranks with one KV head each: half the bytes in a block. Four of them hold copies."""
    for ranks, heads in ((2, 1), (4, 1)):
        shape = replace(SHAPE, tensor_parallel=ranks)
        told = planning.forecast(None, replace(ENGINE, shape=shape), CONTEXT, MOST, AVAILABLE)
        assert told.block_bytes == BLOCK // 2 * heads and told.blocks == 401


# ------------------------------------------------------------------------------------------ models


def test_weights_of_a_checkpoint_and_of_a_config(tiny_model_dir: Path, tmp_path: Path):
    from safetensors.torch import load_file

    config = planning.model_config(str(tiny_model_dir))
    tensors = load_file(tiny_model_dir / "model.safetensors")
    parameters = sum(t.numel() for t in tensors.values())
    config.save_pretrained(tmp_path)
    assert planning.weight_bytes(str(tmp_path), config, torch.bfloat16) == 2 * parameters
    assert planning.weight_bytes(str(tiny_model_dir), config, torch.bfloat16) == pytest.approx(2 * parameters, rel=0.05)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 4000}, "weight_map": {}}')
    assert planning.weight_bytes(str(tmp_path), config, torch.bfloat16) == 2000


def test_quantised_weights_need_their_files(tiny_model_dir: Path, tmp_path: Path):
    config = planning.model_config(str(tiny_model_dir))
    config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(PolicyError, match="quantised"):
        planning.weight_bytes(str(tmp_path), config, torch.bfloat16)
    size = (tiny_model_dir / "model.safetensors").stat().st_size
    assert planning.weight_bytes(str(tiny_model_dir), config, torch.bfloat16) == size


def test_a_split_that_cuts_heads(tiny_model_dir: Path):
    config = planning.model_config(str(tiny_model_dir))
    assert planning.model_shape(config, "", 4).rank_kv_heads == 1
    with pytest.raises(PolicyError, match="--tensor-parallel 3"):
        planning.model_shape(config, "", 3)


def test_no_model(tmp_path: Path):
    with pytest.raises(PolicyError, match=str(tmp_path)):
        planning.model_config(str(tmp_path))

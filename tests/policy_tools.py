"""Head profiles on disk and HeteroCache on them, for the shape of `benchmarks.drift_model`, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.drift_model import KV_HEADS, LAYERS, PROFILE, QUERY_HEADS
from vllm_kvplug.calibrate.profile import HeadProfile, ProfiledModel, ProfileSettings, Provenance
from vllm_kvplug.components.allocators import top_tokens
from vllm_kvplug.policies.heterocache import HeteroCache
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape

SHAPE = ModelShape(LAYERS, KV_HEADS, QUERY_HEADS, head_dim=32, name="drifting-llama")

SLOT_GIB = 64 * 2 * 32 * 4 / 2**30
"""A host slot of this shape in float32."""


def save_profile(folder: Path, profile: dict[str, Any] = PROFILE, settings: ProfileSettings | None = None) -> Path:
    model = ProfiledModel(
        name=SHAPE.name, fingerprint="", layers=LAYERS, kv_heads=KV_HEADS, query_heads=QUERY_HEADS, head_dim=32
    )
    provenance = Provenance(source="made by hand for a test", date="2026-01-01", settings=settings)
    path = folder / "profile.json"
    HeadProfile(model=model, provenance=provenance, **profile).save(path)
    return path


def heterocache(
    folder: Path,
    profile: dict[str, Any] = PROFILE,
    settings: ProfileSettings | None = None,
    tensor_parallel: int = 1,
    **knobs: Any,
) -> HeteroCache:
    path = save_profile(folder, profile, settings)
    shape = replace(SHAPE, tensor_parallel=tensor_parallel)
    policy = make_policy("heterocache", {"profile": str(path), **knobs}, shape)
    assert isinstance(policy, HeteroCache)
    return policy


def kept_tokens(scores: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
    """The tokens that `top_tokens` chooses for every head."""
    longest = max(counts)
    chosen = top_tokens(scores, torch.tensor(counts), longest)
    assert chosen.dtype == torch.int64
    for head, count in enumerate(counts):
        assert chosen[head, count:].tolist() == list(range(count, longest))
    return [tokens[:count].tolist() for tokens, count in zip(chosen, counts, strict=True)]

"""A random model and a profile for drift: several pivots in a layer, out of order, satellites with unlike budgets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LAYERS, KV_HEADS, QUERY_HEADS = 2, 6, 12

# Layer 0 lists its pivots out of order, as greedy clustering does: the released code mixes their baselines up.
PROFILE: dict[str, Any] = {
    "roles": [
        ["satellite", "pivot", "satellite", "satellite", "pivot", "satellite"],
        ["anchor", "satellite", "pivot", "satellite", "anchor", "volatile"],
    ],
    "weights": [[0.6, -1.0, 1.4, 1.0, -1.0, 0.8], [1.2, 1.5, -1.0, 0.5, 1.0, -1.0]],
    "clusters": [{4: [0, 2], 1: [3, 5]}, {2: [1, 3]}],
}


def make_model(folder: Path) -> Path:
    """A random Llama with 2 layers, 12 query heads on 6 KV heads; otherwise as `tiny_model_dir`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "drifting-llama")
    return folder / "drifting-llama"


def write_profile(model_dir: Path, path: Path, profile: Mapping[str, Any] = PROFILE) -> Path:
    """Write PROFILE, or another, as the head profile of a model."""
    from transformers import AutoConfig

    from vllm_kvplug.calibrate.profile import HeadProfile, ProfiledModel, Provenance, kv_shape, model_fingerprint

    config = AutoConfig.from_pretrained(model_dir)
    layers, kv_heads, query_heads, head_dim = kv_shape(config)
    HeadProfile(
        model=ProfiledModel(
            name="drifting-llama",
            fingerprint=model_fingerprint(config),
            layers=layers,
            kv_heads=kv_heads,
            query_heads=query_heads,
            head_dim=head_dim,
        ),
        roles=profile["roles"],
        weights=profile["weights"],
        clusters=profile["clusters"],
        provenance=Provenance(source="made by hand for a test", date="2026-01-01"),
    ).save(path)
    return path

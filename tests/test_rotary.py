"""Angles of rotary positions against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vllm_kvplug.components.expected import turn
from vllm_kvplug.rotary import Rotary, rotary_angles

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def config(**rope: Any) -> LlamaConfig:
    parameters = {"rope_theta": 500_000.0, "rope_type": "default", **rope}
    return LlamaConfig(head_dim=128, num_attention_heads=4, hidden_size=64, rope_parameters=parameters)


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
}


@pytest.mark.parametrize("kind", ROPES)
def test_angles_are_transformers(kind: str):
    rope = ROPES[kind]
    embedding = LlamaRotaryEmbedding(config(**rope))
    angles = torch.tensor(rotary_angles(config(**rope)))
    torch.testing.assert_close(angles, embedding.inv_freq)
    x, position = torch.randn(1, 3, 128), torch.tensor([[0, 17, 900]])
    cos, sin = embedding(x, position)
    first, second = x.chunk(2, -1)
    expected = x * cos + torch.cat([-second, first], -1) * sin
    at = position[0, :, None] * angles
    torch.testing.assert_close(turn(x[0], at.cos(), at.sin()), expected[0], rtol=1e-3, atol=1e-4)


def test_positions_that_work_otherwise():
    assert rotary_angles(config(rope_type="yarn", factor=4.0)) == ()
    assert rotary_angles(PhiConfig()) == ()  # turns a part of each head


def test_rotate_takes_back_what_unrotate_did():
    keys, positions = torch.randn(3, 5, 20), torch.tensor([0, 1, 17, 4000, 100_000])
    rotary = Rotary(1.0 / 10_000 ** (torch.arange(0, 16, 2).float() / 16), 1.3)
    assert torch.allclose(rotary.rotate(rotary.unrotate(keys, positions), positions), keys, atol=1e-5)

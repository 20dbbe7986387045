"""Rotary positions as a model's config describes them, and keys as they were before RoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_kvplug.calibrate.profile import kv_shape
from vllm_kvplug.errors import PolicyError

FIXED_SCALINGS = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on how long a request is."""

ROTATE_HALVES = frozenset(
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe phi3 gemma granite olmo2 starcoder2".split()
)
"""Model types that rotate dimension i together with i + r/2, in every layer. No config says so: others rotate
neighbours, or skip layers, and their keys would come out wrong without any sign of it."""


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys before RoPE, in float32, from rotated ones.

    keys      [..., tokens, d]  rotated in their first r dimensions; the others are passed on
    cos, sin  [tokens, r/2]     what the keys were rotated with, YaRN's attention factor included; the two halves of
                                the rows of vLLM's cos_sin_cache

    Dividing by cos^2 + sin^2 takes out that factor, and makes the result exact where cos and sin were rounded.
    """
    half = cos.shape[-1]
    cos, sin = cos.float(), sin.float()
    norm = cos.square() + sin.square()
    cos, sin = cos / norm, sin / norm
    first, second, rest = keys.float().split([half, half, keys.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=-1)


def rotate(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What `unrotate` takes back: keys [..., tokens, d] before RoPE -> rotated, in float32."""
    half = cos.shape[-1]
    first, second, rest = keys.float().split([half, half, keys.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@dataclass(frozen=True, eq=False)
class Rotary:
    """RoPE of one model: inverse frequencies [r/2] and the factor that cos and sin are multiplied by."""

    frequencies: Tensor
    factor: float

    @classmethod
    def of(cls, hf_config: Any) -> Rotary:
        """Raises PolicyError for a model whose keys cannot be un-rotated from positions alone."""
        model_type, parameters = hf_config.model_type, getattr(hf_config, "rope_parameters", None) or {}
        if model_type not in ROTATE_HALVES:
            raise PolicyError(
                f"keys of model type '{model_type}' cannot be un-rotated: how its rotary embedding pairs "
                f"dimensions is only known for {', '.join(sorted(ROTATE_HALVES))}"
            )
        if "rope_theta" not in parameters:
            raise PolicyError("the model's config has no single rope_theta, its layers rotate differently")
        kind = parameters.get("rope_type", "default")
        if kind not in FIXED_SCALINGS:
            raise PolicyError(
                f"rope_type '{kind}' rotates by angles that depend on a request's length; keys can be un-rotated "
                f"for {', '.join(FIXED_SCALINGS)}"
            )
        if kind != "default":
            return cls(*ROPE_INIT_FUNCTIONS[kind](hf_config))
        rotated = int(kv_shape(hf_config)[3] * parameters.get("partial_rotary_factor", 1.0))
        return cls(1.0 / parameters["rope_theta"] ** (torch.arange(0, rotated, 2).float() / rotated), 1.0)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [tokens] -> cos and sin [tokens, r/2], float32, with the factor."""
        angles = positions[:, None].float() * self.frequencies.to(positions.device)
        return angles.cos() * self.factor, angles.sin() * self.factor

    def unrotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """keys [..., tokens, d] at positions [tokens] -> keys before RoPE, float32."""
        return unrotate(keys, *self.cos_sin(positions))

    def rotate(self, keys: Tensor, positions: Tensor) -> Tensor:
        """keys [..., tokens, d] before RoPE -> as they are at positions [tokens], float32."""
        return rotate(keys, *self.cos_sin(positions))


def rotary_angles(hf_config: Any) -> tuple[float, ...]:
    """Radians per position of each pair (i, i + head_dim / 2); empty where positions work otherwise."""
    try:
        rotary = Rotary.of(hf_config)
    except PolicyError:
        return ()
    whole = 2 * len(rotary.frequencies) == kv_shape(hf_config)[3] and rotary.factor == 1
    return tuple(rotary.frequencies.tolist()) if whole else ()

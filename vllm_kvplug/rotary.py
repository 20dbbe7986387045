"""Rotary positions as a model's config describes them."""

from __future__ import annotations

import math
from typing import Any

from vllm_kvplug.calibrate.profile import kv_shape

HALVES = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types known to rotate every query and key whole, the first half of its values with the second."""


def rotary_angles(hf_config: Any) -> tuple[float, ...]:
    """Radians per position of each pair (i, i + head_dim / 2); empty where positions work otherwise."""
    found = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    base = found.get("rope_theta", getattr(hf_config, "rope_theta", None))
    kind = found.get("rope_type", found.get("type", "default"))
    if hf_config.model_type not in HALVES or base is None or kind not in ("default", "linear", "llama3"):
        return ()
    *_, head_dim = kv_shape(hf_config)
    angles = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "linear":
        angles = [angle / found["factor"] for angle in angles]
    if kind == "llama3":
        angles = [_stretched(angle, found) for angle in angles]
    return tuple(angles)


def _stretched(angle: float, found: dict[str, Any]) -> float:
    """Llama 3.1's: slow pairs are slowed down, quick ones are left, with a ramp between."""
    low, high = found["low_freq_factor"], found["high_freq_factor"]
    turns = found["original_max_position_embeddings"] * angle / (2 * math.pi)
    share = min(max((turns - low) / (high - low), 0.0), 1.0)
    return angle * (share + (1 - share) / found["factor"])

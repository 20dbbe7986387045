"""A random model and a profile for drift: several pivots in a layer, out of order, satellites with unlike budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_kvplug.tiny import head_profile, random_llama

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
    """A random Llama of the shape of PROFILE, in a folder in `folder`."""
    shape = {"layers": LAYERS, "kv_heads": KV_HEADS, "query_heads": QUERY_HEADS}
    return random_llama(folder / "drifting-llama", **shape, hidden_size=96, seed=1)


def write_profile(model: Path, path: Path) -> Path:
    return head_profile(model, path, **PROFILE)

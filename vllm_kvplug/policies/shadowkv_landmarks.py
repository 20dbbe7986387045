"""ShadowKV's way to select: the means of 8 keys say which chunks a query attends to (2410.21465).

A baseline for landmarks. K and V come back from the host as they were: the paper's low-rank keys and outlier chunks are
not there.
"""

from __future__ import annotations

from pydantic import Field

from vllm_kvplug.components.landmarks import GROUP
from vllm_kvplug.policies.selecting import SelectingConfig, SelectingPolicy
from vllm_kvplug.tiers.codecs import CodecName


class ShadowKVConfig(SelectingConfig):
    ratio: float = Field(
        default=0.015625, gt=0, le=1, description="Share of the prompt that each head selects, in chunks of 8 tokens."
    )
    local: int = Field(default=32, ge=1, description="Last prompt tokens, which every query attends to as they are.")


class ShadowKVLandmarks(SelectingPolicy[ShadowKVConfig]):
    """Chunks of 8 tokens by the mean of their keys, anew for every query."""

    name = "shadowkv_landmarks"
    Config = ShadowKVConfig
    unit = GROUP

    def landmarks(self) -> str:
        return "means8"

    def codec(self) -> CodecName:
        return "auto"

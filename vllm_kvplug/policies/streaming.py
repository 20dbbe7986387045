"""StreamingLLM: attention sinks and a sliding window, the same for every head.

Keys keep their true positions (the paper re-rotates them inside the cache; at lengths the model was
trained for the difference is position numbering only).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field

from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.policies.base import Policy, Ring
from vllm_kvplug.shape import ModelShape


class StreamingConfig(PolicyConfig):
    sinks: int = Field(default=4, ge=0, description="First tokens that every head keeps.")
    window: int = Field(default=1024, ge=1, description="Last tokens that every head keeps, the newest included.")

    def holding(self, tokens: int) -> Self:
        return type(self)(**{**self.model_dump(exclude_unset=True), "window": tokens})


class Streaming(Policy[StreamingConfig]):
    """Sinks + window, bounded from the first chunk on: a request never holds more than that."""

    name = "streaming"
    Config = StreamingConfig

    def __init__(self, config: StreamingConfig, shape: ModelShape):
        super().__init__(config, shape)
        self.ring = Ring(config.sinks, config.window)

"""YAKV: the prompt lies on the host in 4 bits, and landmarks of 2 bits select what each query attends to (2604.08426).

The algorithm of the paper's accuracy tables: codes by head, the maximum over a group of the softmax of its queries, top
tokens for every KV head, step and layer. Decoded tokens stay as they are.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vllm_kvplug.policies.selecting import SelectingConfig, SelectingPolicy


class YakvConfig(SelectingConfig):
    codec: Literal["auto", "higgs4"] = Field(
        default="higgs4", description="K and V on the host: in 4 bits a value (higgs4), or as they are (auto)."
    )
    landmarks: Literal["higgs2", "residual"] = Field(
        default="higgs2", description="Keys in device memory: in 2 bits a value (higgs2), or about 1.5 (residual)."
    )


class Yakv(SelectingPolicy[YakvConfig]):
    """The same budget for every head, its own tokens for each, anew for every query."""

    name = "yakv"
    Config = YakvConfig

    def landmarks(self) -> str:
        return self.config.landmarks

    def codec(self) -> Literal["auto", "higgs4"]:
        return self.config.codec

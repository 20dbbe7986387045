"""K-norm: tokens whose keys are short, chosen over all heads together as a prompt comes in (2406.11430)."""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_kvplug.config import AllocationKnob, PolicyConfig
from vllm_kvplug.cuts import Cuts
from vllm_kvplug.policies.base import Gate, Policy


class KnormConfig(PolicyConfig):
    request_knob = "ratio"

    ratio: float = Field(default=0.5, gt=0, le=1, description="Share of the prompt that heads keep on average.")
    window: int = Field(default=64, ge=1, description="Last tokens that are always kept.")
    cut_every: int = Field(default=2048, ge=16, description="Prompt tokens between two cuts.")
    allocation: AllocationKnob = "joint"


class NormGate:
    """Queries attend to keys of a small norm: the score is what is missing to a norm of zero."""

    def rows(self, layer: int) -> None:
        return None

    def score(
        self, layer: int, key: torch.Tensor, position: torch.Tensor, projected: torch.Tensor | None
    ) -> torch.Tensor:
        return -key.float().norm(dim=-1)


class Knorm(Policy[KnormConfig]):
    """No calibration, no weights and no queries: what a trained gate has to beat."""

    name = "knorm"
    Config = KnormConfig

    def cuts(self, prompt_len: int) -> Cuts:
        config = self.config
        return Cuts.of_ratio(prompt_len, config.cut_every, config.window, config.ratio, allocation=config.allocation)

    def make_gate(self, heads: range, dtype: torch.dtype, device: torch.device) -> Gate:
        return NormGate()

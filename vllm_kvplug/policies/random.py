"""Random eviction: the control every scorer must beat at the same budget."""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_kvplug.config import BudgetConfig
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView


class RandomConfig(BudgetConfig):
    seed: int = Field(default=0, ge=0, le=1_000_000, description="Seed of the choice.")


class Random(Policy[RandomConfig]):
    """Every head keeps tokens of the prompt drawn without replacement."""

    name = "random"
    Config = RandomConfig

    def kept(self, prompt_len: int) -> Kept:
        return [[self.config.tokens(prompt_len)] * self.shape.kv_heads] * self.shape.layers

    def score(self, view: PromptView) -> torch.Tensor:
        # Drawn on the CPU by global head, so that devices and tensor-parallel ranks agree.
        rows = []
        for head in view.heads:
            generator = torch.Generator()
            generator.manual_seed((self.config.seed * 1_000_003 + view.layer) * 1_000_003 + head)
            rows.append(torch.rand(view.keys.shape[1], generator=generator))
        return torch.stack(rows).to(view.keys.device, non_blocking=True)

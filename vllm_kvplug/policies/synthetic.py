"""Synthetic eviction: a share of the prompt, spread over heads as learned policies spread it. For measuring speed only.

Random weights give real scorers nothing to decide on. This one keeps what it is told to, wherever the model looks:
some heads whole, most of them at a small part of the prompt.
"""

from __future__ import annotations

import random
from functools import cached_property

import torch
from pydantic import Field

from vllm_kvplug.components.allocators import water_fill
from vllm_kvplug.config import CONFIG_FLAG, PolicyConfig, share_of
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView
from vllm_kvplug.shape import ModelShape

SPREAD = 0.8
"""Standard deviation of the logarithm of weights: the largest of a hundred is some fifty times the smallest."""


class SyntheticConfig(PolicyConfig):
    request_knob = "ratio"

    ratio: float = Field(default=0.2, gt=0, le=1, description="Share of its full KV cache that a prompt keeps.")
    full_heads: float = Field(default=0.1, ge=0, le=1, description="Share of heads that keep the whole prompt.")
    seed: int = Field(default=0, ge=0, description="Seed of which heads these are, and of the others' weights.")


class Synthetic(Policy[SyntheticConfig]):
    """Keeps a given share, some heads whole and the rest unevenly; which tokens is arbitrary."""

    name = "synthetic"
    Config = SyntheticConfig

    def __init__(self, config: SyntheticConfig, shape: ModelShape):
        super().__init__(config, shape)
        self.check_budget()

    def check_budget(self) -> None:
        if self.config.ratio < self.config.full_heads:
            raise PolicyError(
                f"synthetic: full_heads={self.config.full_heads} alone keep more than ratio={self.config.ratio}: "
                f"change one of them in {CONFIG_FLAG}"
            )

    @cached_property
    def weights(self) -> list[float | None]:
        """Weight of every head, None for those that keep everything; layer by layer."""
        draw = random.Random(self.config.seed)
        heads = self.shape.heads
        full = set(draw.sample(range(heads), share_of(self.config.full_heads, heads)))
        return [None if head in full else draw.lognormvariate(0, SPREAD) for head in range(heads)]

    def kept(self, prompt_len: int) -> Kept:
        weights = [w for w in self.weights if w is not None]
        full = len(self.weights) - len(weights)
        total = share_of(self.config.ratio, self.shape.heads * prompt_len) - full * prompt_len
        budgets = iter(water_fill(total, weights, 1, prompt_len))
        flat = [prompt_len if w is None else next(budgets) for w in self.weights]
        return [flat[i : i + self.shape.kv_heads] for i in range(0, len(flat), self.shape.kv_heads)]

    def score(self, view: PromptView) -> torch.Tensor:
        # Multiplicative hashing: the same on every device and rank, and free next to reading the keys.
        token = torch.arange(view.keys.shape[1], device=view.keys.device)
        head = torch.arange(view.heads.start, view.heads.stop, device=view.keys.device)[:, None]
        hashed = (token * 2_654_435_761 + (view.layer * 131 + head) * 40_503 + self.config.seed) % (1 << 24)
        return hashed.float()

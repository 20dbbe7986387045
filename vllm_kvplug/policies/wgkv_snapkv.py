"""WG-KV with a bounded cache: what the gate admitted is evicted by SnapKV's scores when there is too much of it.

2512.17452, the part on eviction, and the authors' code: an answer of any length fits in a fixed budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from pydantic import Field

from vllm_kvplug.components.scorers import stored_votes
from vllm_kvplug.config import PoolWidth
from vllm_kvplug.cuts import AdmissionCuts
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.policies.wgkv import WGKV, WGKVConfig
from vllm_kvplug.shape import ModelShape


class WGKVSnapKVConfig(WGKVConfig):
    budget: int = Field(
        default=4096,
        ge=16,
        description="Tokens beyond the window that heads may store on average; where the gate has admitted more, "
        "those that the newest queries attend to least go, until a tenth of the budget is free again.",
    )
    queries: int = Field(
        default=32,
        ge=1,
        description="Newest queries that vote, at most as many as the window; kept for every request, all query heads "
        "and layers.",
    )
    kernel: PoolWidth = Field(default=5, description="Width of the maximum pool over votes.")

    def holding(self, tokens: int) -> Self:
        unbounded = {"tau": 0.0, "cap": 1.0, "budget": max(tokens, 16)}
        return type(self)(**{**self.model_dump(exclude_unset=True), **unbounded})


class WGKVSnapKV(WGKV):
    """The write gate for admission, SnapKV for eviction. Every head gives way by the same share."""

    name = "wgkv+snapkv"
    Config = WGKVSnapKVConfig
    config: WGKVSnapKVConfig

    def __init__(self, config: WGKVSnapKVConfig, shape: ModelShape):
        super().__init__(config, shape)
        assert self.local is not None
        if config.queries > self.local.tokens:
            raise PolicyError(
                f"--kv-policy-config: queries ({config.queries}) must not exceed the window ({self.local.tokens})"
            )
        self.query_window = config.queries

    def cuts(self, prompt_len: int) -> AdmissionCuts:
        return replace(super().cuts(prompt_len), budget=self.config.budget)

    def score(self, view: PromptView) -> torch.Tensor:
        assert view.counts is not None
        return stored_votes(view.queries, view.keys, view.counts, view.scale, self.config.kernel)

"""SnapKV: at the end of the prompt each head keeps what its last queries attend to (2404.14469)."""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_kvplug.components.scorers import prompt_attention, smooth
from vllm_kvplug.config import BudgetConfig, LayerAllocationKnob, PoolWidth
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView
from vllm_kvplug.shape import ModelShape


class SnapKVConfig(BudgetConfig):
    window: int = Field(default=64, ge=1, description="Last prompt tokens that vote, and are always kept.")
    kernel: PoolWidth = Field(default=5, description="Width of the average pool over votes.")
    allocation: LayerAllocationKnob = "uniform"


class SnapKV(Policy[SnapKVConfig]):
    """The same budget for every head, or for a layer's heads together; its own tokens for each."""

    name = "snapkv"
    Config = SnapKVConfig

    def __init__(self, config: SnapKVConfig, shape: ModelShape):
        super().__init__(config, shape)
        self.query_window = config.window

    @property
    def shares_layers(self) -> bool:
        return self.config.allocation == "layer"

    def kept(self, prompt_len: int) -> Kept:
        return [[self.config.tokens(prompt_len)] * self.shape.kv_heads] * self.shape.layers

    def score(self, view: PromptView) -> torch.Tensor:
        tokens, window = view.keys.shape[1], view.queries.shape[0]
        attention = prompt_attention(view.queries, view.keys, view.scale)  # [H, G, window, tokens]
        votes = smooth(attention[..., : tokens - window].mean(2), self.config.kernel).mean(1)
        # Votes are at most 1: the window comes before them, its newest tokens first if the budget is below it.
        recent = torch.arange(2.0, window + 2.0, device=votes.device).expand(votes.shape[0], window)
        return torch.cat([votes, recent], 1)

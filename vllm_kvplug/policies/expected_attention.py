"""Expected Attention: keep what the queries yet to come are likely to attend to (2510.00636).

They are taken to be distributed as the prompt's last queries are, at the positions that follow. What a token is worth
is the attention that it can expect times the norm of its value.
"""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_kvplug.components.expected import expected_attention, query_statistics
from vllm_kvplug.config import BudgetConfig, LayerAllocationKnob
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView
from vllm_kvplug.shape import ModelShape


class ExpectedAttentionConfig(BudgetConfig):
    window: int = Field(default=512, ge=1, description="Last prompt queries whose distribution is taken.")
    sinks: int = Field(default=4, ge=0, description="First tokens, which are kept and whose queries do not count.")
    future: int = Field(default=512, ge=1, description="Positions after the prompt at which queries are expected.")
    allocation: LayerAllocationKnob = "uniform"


class ExpectedAttention(Policy[ExpectedAttentionConfig]):
    """The same budget for every head, or for a layer's heads together; tokens by expected attention and values."""

    name = "expected_attention"
    Config = ExpectedAttentionConfig

    def __init__(self, config: ExpectedAttentionConfig, shape: ModelShape):
        super().__init__(config, shape)
        if not shape.rotary:
            raise PolicyError(
                "expected_attention moves queries to other positions, and does not know how "
                f"{shape.name or 'this model'} encodes them: choose another --kv-policy"
            )
        self.query_window = config.window

    @property
    def shares_layers(self) -> bool:
        return self.config.allocation == "layer"

    def kept(self, prompt_len: int) -> Kept:
        return [[self.config.tokens(prompt_len)] * self.shape.kv_heads] * self.shape.layers

    def score(self, view: PromptView) -> torch.Tensor:
        tokens, sinks = view.keys.shape[1], self.config.sinks
        result = torch.full(view.keys.shape[:2], torch.inf, device=view.keys.device)
        if tokens <= sinks:
            return result
        first = tokens - view.queries.shape[0]
        skip = max(sinks - first, 0)
        statistics = query_statistics(view.queries[skip:], first + skip, tokens, self.config.future, self.shape.rotary)
        expected = expected_attention(*statistics, view.keys[:, sinks:], view.scale)
        result[:, sinks:] = expected * view.values[:, sinks:].float().norm(dim=-1)
        return result

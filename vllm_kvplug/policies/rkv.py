"""R-KV: while a request decodes, keep what its newest queries attend to and what no other token says (2505.24133)."""

from __future__ import annotations

from fractions import Fraction
from typing import Self

import torch
from pydantic import Field

from vllm_kvplug.components.redundancy import importance, redundancy
from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.cuts import Cuts, DecodeCuts
from vllm_kvplug.policies.base import Policy, PromptView

DECODE_EVERY, NEWEST, KERNEL = 128, 8, 7
"""Tokens between cuts, the last of them that vote and stay, and the width of the pool over votes."""

NEVER = 1 << 30
"""Tokens between the cuts of a prompt, which is kept whole until the first cut of the answer."""


class RKVConfig(PolicyConfig):
    decode_budget: int = Field(
        default=1024, ge=16, description="Tokens that a head keeps while a request decodes, looked at every 128 tokens."
    )
    importance: float = Field(
        default=0.1, ge=0, le=1, description="Weight of importance in a token's score; the rest is that of redundancy."
    )

    def holding(self, tokens: int) -> Self:
        return type(self)(**{**self.model_dump(exclude_unset=True), "decode_budget": max(tokens, 16)})


class RKV(Policy[RKVConfig]):
    """The same budget for every head, of prompt and answer together; tokens are scored anew at every cut."""

    name = "rkv"
    Config = RKVConfig
    query_window = NEWEST

    def cuts(self, prompt_len: int) -> Cuts:
        decode = DecodeCuts(DECODE_EVERY, self.config.decode_budget, sinks=0, recent=NEWEST)
        return Cuts(prompt_len, NEVER, 1, Fraction(1), decode, allocation="uniform")

    def score(self, view: PromptView) -> torch.Tensor:
        weight, older = self.config.importance, view.keys.shape[1] - len(view.queries)
        needed = importance(view.queries, view.keys[:, :older], view.scale, KERNEL)
        scores = weight * needed - (1 - weight) * redundancy(view.keys)[:, :older]
        return torch.nn.functional.pad(scores, (0, len(view.queries)), value=torch.inf)

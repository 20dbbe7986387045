"""A third party's policy, as small as one can be: every head keeps the first and the last tokens of a prompt."""

from __future__ import annotations

import torch
from pydantic import Field

from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.plan import Kept
from vllm_kvplug.policies.base import Policy, PromptView


class EndsConfig(PolicyConfig):
    ends: int = Field(default=8, ge=1, description="Tokens kept at either end of the prompt.")


class Ends(Policy[EndsConfig]):
    """The first and the last tokens of a prompt."""

    name = "ends"
    Config = EndsConfig

    def kept(self, prompt_len: int) -> Kept:
        return [[min(2 * self.config.ends, prompt_len)] * self.shape.kv_heads] * self.shape.layers

    def score(self, view: PromptView) -> torch.Tensor:
        heads, tokens = view.keys.shape[:2]
        position = torch.arange(tokens, device=view.keys.device)
        return -torch.minimum(position, tokens - 1 - position).float().expand(heads, tokens)

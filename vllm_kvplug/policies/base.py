"""The contract of a policy.

A policy is one file: a frozen config, and a class that says what every head keeps and how tokens are
ranked. It sees lengths, queries and keys; it never touches vLLM objects, blocks or pages.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch

from vllm_kvplug.config import PolicyConfig
from vllm_kvplug.plan import Kept, PagePlan
from vllm_kvplug.shape import ModelShape

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


@dataclass(frozen=True)
class Ring:
    """A head that sees its first `sinks` tokens and its last `window` tokens, and stores no others."""

    sinks: int
    window: int

    @property
    def tokens(self) -> int:
        return self.sinks + self.window


@dataclass(frozen=True)
class PromptView:
    """What a scorer sees of one layer when a prompt is complete.

    queries: [window, query heads of the rank, head_dim], the prompt's last queries after RoPE, oldest
        first; window is the policy's `query_window`, or the whole prompt where that is shorter.
    keys: [KV heads of the rank, tokens, head_dim], after RoPE.
    layer: index of the layer. heads: global index of each KV head of the rank. scale: softmax scale.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    layer: int
    heads: range
    scale: float


class Policy(ABC, Generic[ConfigT]):
    """One named filling of the slots admission, selection, eviction and offload.

    `ring` bounds what is stored and seen at all times (admission). Otherwise the prompt is stored whole
    and, if the class overrides `kept`, cut down once when it is complete (eviction): every head keeps
    the `kept(n)[layer][head]` tokens that `score` ranks highest. Decoded tokens are kept.
    """

    name: ClassVar[str]
    Config: ClassVar[type[PolicyConfig]] = PolicyConfig
    uses_host_tier: ClassVar[bool] = False
    ring: Ring | None = None
    query_window: int = 0

    def __init__(self, config: ConfigT, shape: ModelShape):
        """Raises PolicyError if the config cannot work for a model of this shape."""
        self.config = config
        self.shape = shape

    def kept(self, prompt_len: int) -> Kept:
        """Tokens each head keeps of a prompt of `prompt_len` >= 1 tokens, [layers][kv_heads].

        Each value is in 1..prompt_len.
        """
        raise NotImplementedError

    def score(self, view: PromptView) -> torch.Tensor:
        """Rank of every prompt token for every head, float32 [KV heads of the rank, tokens].

        Higher is kept; +inf is kept before all others; ties go to the earlier token.
        """
        raise NotImplementedError

    @property
    def evicts_after_prefill(self) -> bool:
        return type(self).kept is not Policy.kept

    def plan(self) -> PagePlan:
        kept = self.kept if self.evicts_after_prefill else None
        return PagePlan(self.shape, kept, self.ring.tokens if self.ring else None)

    def summary(self) -> str:
        """One line for the log: the resolved budget in words."""
        return ", ".join(f"{k}={v}" for k, v in self.config.model_dump(exclude_none=True).items())

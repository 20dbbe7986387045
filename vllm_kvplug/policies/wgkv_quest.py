"""WG-KV whose decode queries attend to their window and to the best pages of what the gate admitted, by Quest's bounds.

2512.17452, the part on selection, and the authors' code; the bounds of keys are those of 2406.10774.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field

from vllm_kvplug.config import CONFIG_FLAG
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.plan import ceil_div
from vllm_kvplug.policies.base import PageSelection
from vllm_kvplug.policies.wgkv import WGKV, WGKVConfig
from vllm_kvplug.shape import PAGE, ModelShape


class WGKVQuestConfig(WGKVConfig):
    budget_tokens: int = Field(
        default=2048, ge=1, description="Tokens that a decode query attends to, the window among them, in whole pages."
    )

    def holding(self, tokens: int) -> Self:
        everything = {"tau": 0.0, "cap": 1.0, "budget_tokens": max(tokens, self.budget_tokens)}
        return type(self)(**{**self.model_dump(exclude_unset=True), **everything})


class WGKVQuest(WGKV):
    """The write gate for admission, Quest for selection. A head's newest page behind the window is always chosen."""

    name = "wgkv+quest"
    Config = WGKVQuestConfig
    config: WGKVQuestConfig
    selects = True

    def __init__(self, config: WGKVQuestConfig, shape: ModelShape):
        super().__init__(config, shape)
        assert self.local is not None
        window = self.local.tokens
        if window % PAGE:
            raise PolicyError(
                f"{CONFIG_FLAG}: {self.name} chooses pages of {PAGE} tokens: the window ({window}) must be a multiple "
                "of that, so that none holds both tokens of the window and others"
            )
        if config.budget_tokens < window + PAGE:
            raise PolicyError(
                f"{CONFIG_FLAG}: budget_tokens ({config.budget_tokens}) must hold the window ({window}) and a page of "
                f"{PAGE} tokens"
            )
        self.page_selection = PageSelection(dense_layers=0, local_pages=window // PAGE)

    def attended_pages(self, tokens: int) -> int:
        """For a head that has admitted everything; others may have fewer."""
        return min(ceil_div(self.config.budget_tokens, PAGE), ceil_div(tokens, PAGE))

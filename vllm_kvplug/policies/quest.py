"""Quest: every query attends to the pages whose keys' bounds promise the most (2406.10774). All K and V stay."""

from __future__ import annotations

from pydantic import Field

from vllm_kvplug.config import BudgetConfig
from vllm_kvplug.policies.base import PageSelection, Policy
from vllm_kvplug.shape import PAGE, ModelShape


class QuestConfig(BudgetConfig):
    ratio: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a request's tokens so far that a query attends to (0.5 unless budget_tokens is given).",
    )
    budget_tokens: int | None = Field(default=None, ge=1, description="Tokens that a query attends to, in their place.")
    dense_layers: int = Field(default=2, ge=0, description="First layers, whose queries attend to everything.")


class Quest(Policy[QuestConfig]):
    """The same number of pages for every head, its own pages for each; the newest page is always one of them."""

    name = "quest"
    Config = QuestConfig
    selects = True

    def __init__(self, config: QuestConfig, shape: ModelShape):
        super().__init__(config, shape)
        self.page_selection = PageSelection(config.dense_layers)

    def attended_pages(self, tokens: int) -> int:
        """At least 3, as in the authors' code."""
        whole = -(-tokens // PAGE)
        return whole if self.options.off else min(max(-(-self.config.tokens(tokens) // PAGE), 3), whole)

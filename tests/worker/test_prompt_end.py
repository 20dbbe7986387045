"""What heads keep at the end of a prompt: protected tokens, and where a layer shares its budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_policy import Ends

from vllm_kvplug.memory import Geometry
from vllm_kvplug.options import RequestOptions
from vllm_kvplug.placement.integrity import kept_positions
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables, TableSizes
from vllm_kvplug.policies.base import PromptView
from vllm_kvplug.shape import PAGE, ModelShape
from vllm_kvplug.worker.prompt_end import PromptEnd
from vllm_kvplug.worker.requests import LiveRequest

SHAPE = ModelShape(layers=1, kv_heads=2, query_heads=2, head_dim=1)


class Edges(Ends):
    """Ranks what it wants infinite, as the example in docs/policies.md does."""

    def score(self, view: PromptView) -> torch.Tensor:
        scores = super().score(view)
        return scores.masked_fill(scores > -self.config.ends, torch.inf)


class Louder(Ends):
    """The second head's scores are above all of the first's, and the layer shares its budget."""

    shares_layers = True

    def score(self, view: PromptView) -> torch.Tensor:
        return super().score(view) + torch.tensor([[0.0], [1000.0]])


def kept_of_a_prompt(policy: Any, tokens: int, *protect: tuple[int, int]) -> list[list[int]]:
    """Positions that each head keeps of a prompt."""
    geometry = Geometry(1, 2, 0, 2, 1, torch.float32, 1.0, max_requests=1, max_tokens=tokens, page_dtype=torch.float32)
    tables = PageTables(TableSizes(1, 2, tokens, 9), "cpu")
    pool = PagePool(torch.zeros(9 * 2, PAGE, 2))
    row = torch.arange(1, 9, dtype=torch.int32)[None]
    tables.extend(0, row, 0, tokens, 0, 1 << 30)
    served = policy.for_request(RequestOptions(protect=protect))
    request = LiveRequest(0, tokens, tokens, served, served.plan(), row=row)
    end = PromptEnd(geometry, pool, tables)
    end.compact_layer(request, 0, torch.zeros(0, 2, 1))
    end.give_back(request)
    return kept_positions(tables, 0)


@pytest.mark.parametrize("kind, best", [(Ends, [0, 99]), (Edges, [0, 1])])
def test_protected_tokens_are_kept_whatever_the_scores(kind: type[Ends], best: list[int]):
    """Also where all heads share one row of scores, or a policy's own infinite ones would fill the budget."""
    policy = kind(kind.Config(ends=3), SHAPE)
    assert kept_of_a_prompt(policy, 100) == [[0, 1, 2, 97, 98, 99]] * 2
    assert kept_of_a_prompt(policy, 100, (10, 12), (50, 52)) == [sorted([10, 11, 50, 51, *best])] * 2
    assert kept_of_a_prompt(policy, 100, (20, 40), (70, 75)) == [[*range(20, 40), *range(70, 75)]] * 2


def test_a_layer_that_shares_gives_its_budget_to_the_best_scores():
    """Of 2 x 10 tokens a fifth of an even share, 2, is a head's own, beside what is protected."""
    policy = Louder(Louder.Config(ends=5), SHAPE)
    assert kept_of_a_prompt(policy, 100) == [[0, 99], [*range(9), *range(91, 100)]]
    protected = list(range(40, 45))  # 5 of a head's 10: of the other 5 one is its own
    assert kept_of_a_prompt(policy, 100, (40, 45)) == [[0, *protected], [*range(5), *protected, *range(96, 100)]]
    assert kept_of_a_prompt(policy, 8) == [list(range(8))] * 2

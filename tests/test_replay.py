"""The replay measurement: whose masks a sequence gets, and what a random order keeps."""

from __future__ import annotations

import pytest
import torch

from benchmarks.replay import FIRST, measure, shuffled


class FakeStudent:
    """Its output behind a mask is the mask's first number; sequence n's own masks hold 10 * n, and nothing else."""

    def full(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1)

    def admitting(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.ones(1), [torch.full((2, 8), 10.0 * ids[0])]

    def replaying(self, ids: torch.Tensor, masks: list[torch.Tensor]) -> torch.Tensor:
        return masks[0][0, :1]


def test_each_sequence_replays_the_next_ones_masks() -> None:
    sequences = [torch.tensor([n]) for n in (1, 2, 3)]
    rows = measure(FakeStudent(), sequences, None, 0)
    assert [row["replayed"] for row in rows] == [400, 900, 100]
    assert [row["random"] for row in rows] == [100, 400, 900]
    assert [row["own"] for row in rows] == [1, 1, 1]
    assert [row["admitted"] for row in rows] == [10, 20, 30]


def test_out_of_time_the_circle_closes() -> None:
    rows = measure(FakeStudent(), [torch.tensor([n]) for n in (1, 2, 3)], 0.0, 0)
    assert [row["replayed"] for row in rows] == [100]


@pytest.mark.parametrize("first", [0, FIRST])
def test_a_random_order_admits_as_many(first: int) -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [(torch.rand(3, 200, generator=generator) < 0.3).float() for _ in range(2)]
    for mask, random in zip(masks, shuffled(masks, first, generator), strict=True):
        assert torch.equal(random.sum(1), mask.sum(1)) and not torch.equal(random, mask)
        assert torch.equal(random[:, :first], mask[:, :first])
        assert not torch.equal(random[0], random[1])

"""Keys as coarse means and fine residuals."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplug.quant.higgs import Higgs
from vllm_kvplug.quant.residual import ResidualHiggs, group_means


def keys_of(*shape: int) -> torch.Tensor:
    """Keys whose neighbours are alike, as those of real text are."""
    generator = torch.Generator().manual_seed(0)
    *lead, tokens, dim = shape
    shared = torch.randn((*lead, -(-tokens // 8), dim), generator=generator).repeat_interleave(8, -2)
    return 2 * shared[..., :tokens, :] + torch.randn(shape, generator=generator)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 24, 30])
def test_is_the_plain_reference(tokens: int):
    keys = keys_of(2, tokens, 64)
    residual = ResidualHiggs(64)
    encoded = residual.encode(keys)
    found = residual.decode(encoded)
    expected = torch.empty_like(keys)
    for head in range(2):
        for first in range(0, tokens, 8):
            group = [keys[head, min(t, tokens - 1)] for t in range(first, first + 8)]
            mean = Higgs(4, 64).decode(*Higgs(4, 64).encode(torch.stack(group).mean(0)))
            for t in range(first, min(first + 8, tokens)):
                left = keys[head, t] - mean
                expected[head, t] = mean + Higgs(1, 64).decode(*Higgs(1, 64).encode(left))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sum(part.element_size() * part.numel() for part in encoded) == 2 * (-(-tokens // 8) * 34 + tokens * 10)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("tokens", [0, 5, 16, 21])
def test_scores_are_decode_then_dot(lead: tuple[int, ...], tokens: int):
    residual = ResidualHiggs(48)
    keys, query = keys_of(*lead, tokens, 48), torch.randn(*lead, 3, 48)
    encoded = residual.encode(keys)
    expected = query.double() @ residual.decode(encoded).double().transpose(-1, -2)
    found = residual.scores(query, encoded)
    assert found.shape == (*lead, 3, tokens)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-4)


def test_beats_one_bit_where_neighbours_are_alike():
    keys = keys_of(400, 64)
    one = Higgs(1, 64)
    error = (ResidualHiggs(64).decode(ResidualHiggs(64).encode(keys)) - keys).square().mean()
    assert error < 0.5 * (one.decode(*one.encode(keys)) - keys).square().mean()


def test_group_means():
    keys = torch.arange(11.0)[:, None]
    assert group_means(keys).flatten().tolist() == [3.5, (8 + 9 + 6 * 10) / 8]


def test_a_nan_stays_in_its_group():
    keys = keys_of(24, 64)
    clean = ResidualHiggs(64).decode(ResidualHiggs(64).encode(keys))
    keys[9, 0] = torch.nan
    found = ResidualHiggs(64).decode(ResidualHiggs(64).encode(keys))
    assert found[8:16].isnan().all()
    assert torch.equal(found[:8], clean[:8]) and torch.equal(found[16:], clean[16:])

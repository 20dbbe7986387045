"""The gate of Fast KVzip as one rank holds it."""

from __future__ import annotations

import torch
from cases import fastkvzip

from vllm_kvplug.policies.fastkvzip import HiddenGate


def test_the_projection_is_not_copied_to_the_device():
    gate = fastkvzip(0.3, 4, 16).gate
    held = HiddenGate(gate, slice(1, 2), torch.bfloat16, torch.device("meta"))
    assert held.rows(2).device.type == "meta" and gate.projection.device.type == "cpu"
    assert {weight.device.type for name, weight in gate.named_parameters() if name != "projection"} == {"meta"}


def test_scores_of_a_rank_are_those_of_the_gate():
    gate = fastkvzip(0.3, 4, 16).gate
    hidden = torch.randn(7, 64)
    expected = gate.score(1, hidden)
    held = HiddenGate(gate, slice(1, 2), torch.float32, torch.device("cpu"))
    rows = held.rows(1)
    assert rows.is_contiguous() and rows.dtype == torch.float32
    found = held.score(1, torch.empty(7, 1, 32), torch.arange(7), hidden @ rows.T)
    torch.testing.assert_close(found, expected[1:2].T)

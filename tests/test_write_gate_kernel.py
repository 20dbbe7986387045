"""The write gate in one launch against the gate in torch: odd sizes, a rank's heads, far positions, broken keys."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_tools import DEVICE, INTERPRETED, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug import ops
from vllm_kvplug.gates.write_gate import WriteGate
from vllm_kvplug.rotary import Rotary

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """heads: the rank's; of_all: a layer's on all ranks, among which the rank's end."""

    tokens: int
    heads: int = 2
    of_all: int = 2
    dim: int = 64
    hidden: int = 256
    start: int = 0


CASES = [
    Case(1),
    Case(17, dim=8, hidden=24),
    Case(64, heads=1, dim=128, hidden=512),
    Case(130, heads=3, of_all=5, hidden=70, start=131_000),
    Case(65, dim=80, hidden=1),
]


class Batch:
    def __init__(self, case: Case, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        self.gate = WriteGate(2, case.of_all, case.dim, case.hidden).requires_grad_(False)
        for weight in self.gate.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
        self.gate = self.gate.to(DEVICE, dtype)
        self.heads = slice(case.of_all - case.heads, case.of_all)
        self.rotary = Rotary(10_000.0 ** -torch.linspace(0, 1, case.dim // 2, device=DEVICE), 1.0)
        qkv = torch.randn(case.tokens, case.heads + 2, case.dim, generator=generator).to(DEVICE, dtype)
        self.key = qkv[:, 1:-1]  # as it lies in a projection's output
        self.position = torch.arange(case.start, case.start + case.tokens, device=DEVICE)
        self.whole = torch.full((case.tokens + 3, case.heads), NAN, device=DEVICE)

    def run(self) -> torch.Tensor:
        gate, layer = self.gate, 1
        norms = gate.norm_pre[layer], gate.norm_rope[layer]
        weights = gate.w1[layer], gate.b1[layer], gate.w2[layer], gate.b2[layer]
        out = self.whole[: len(self.key)]
        ops.write_gate(out, self.key, self.position, self.rotary.frequencies, norms, weights, self.heads.start)
        return out.cpu()

    def reference(self) -> torch.Tensor:
        """In float32 on the CPU, from the same numbers."""
        rotary = Rotary(self.rotary.frequencies.cpu(), 1.0)
        rotated = self.key.float().cpu().transpose(0, 1)
        pre = rotary.unrotate(rotated, self.position.cpu())
        return self.gate.float().cpu().score(1, pre, rotated, self.heads).T


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_write_gate(case: Case, dtype: torch.dtype) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    batch = Batch(case, dtype)
    actual, tolerance = batch.run(), TOLERANCE[dtype]
    expected = batch.reference()
    assert expected.std() > 0.05 or case.tokens == 1, "a gate that says the same of all tokens"
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert batch.whole[case.tokens :].isnan().all()


@runs_kernel
def test_broken_keys_spoil_their_own_scores_only() -> None:
    batch = Batch(Case(20), torch.float32)
    batch.key[3, 0, 5], batch.key[7, 1, 0] = NAN, torch.inf
    actual, expected = batch.run(), batch.reference()
    assert actual.isnan().sum() == 2 and actual[3, 0].isnan() and actual[7, 1].isnan()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)

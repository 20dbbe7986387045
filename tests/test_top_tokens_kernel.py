"""The radix selection among every head's scores, against a stable sort."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kernel_tools import DEVICE, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug.components.selection import best

POISON = -7


def starts_of(lengths: Sequence[int], unit: int) -> torch.Tensor:
    units = torch.tensor([0, *(-(-length // unit) for length in lengths)])
    return units.cumsum(0).int()


def choose(
    scores: list[torch.Tensor], wanted: list[int], unit: int = 1, out_unit: int = 1, longest: int | None = None
) -> list[torch.Tensor]:
    """scores: of each row [heads, n]. Returns what was written for each row, int32 [heads, whatever fits]."""
    from vllm_kvplug.kernels.top_tokens import TopTokens

    heads, lengths = len(scores[0]), [of_row.shape[1] for of_row in scores]
    starts, out_starts = starts_of(lengths, unit), starts_of(wanted, out_unit)
    line = [torch.nn.functional.pad(s, (0, -s.shape[1] % unit), value=torch.inf).flatten() for s in scores]
    out = torch.full((int(out_starts[-1]) * heads * out_unit + 3,), POISON, dtype=torch.int32, device=DEVICE)
    top = TopTokens(len(scores) + 2, heads, longest or max(lengths), torch.device(DEVICE))
    for room in (top._counts, top._above, top._state):
        room.fill_(1 << 30)
    of_rows = (torch.tensor(n, dtype=torch.int32, device=DEVICE)[:, None].expand(-1, heads) for n in (lengths, wanted))
    lines = torch.cat([*line, torch.zeros(1)]).to(DEVICE), starts.to(DEVICE)
    top.choose(out, out_starts.to(DEVICE), out_unit, *lines, unit, *of_rows)
    assert (out[int(out_starts[-1]) * heads * out_unit :] == POISON).all()
    bounds = (out_starts * heads * out_unit).tolist()
    return [out[a:b].cpu().view(heads, -1) for a, b in zip(bounds, bounds[1:], strict=False)]


def check(scores: list[torch.Tensor], wanted: list[int], **how: int) -> None:
    for of_row, count, found in zip(scores, wanted, choose(scores, wanted, **how), strict=True):
        count = min(count, of_row.shape[1])
        assert found[:, :count].tolist() == best(of_row, count).sort(-1).values.tolist()
        assert (found[:, count:] == POISON).all()


@runs_kernel
@pytest.mark.parametrize("unit, out_unit", [(1, 1), (48, 16)])
def test_rows_of_unlike_length(unit: int, out_unit: int) -> None:
    """Nothing, one token, odd sizes, several blocks and parts; budgets from nothing to more than there is."""
    torch.manual_seed(0)
    lengths, wanted = [0, 1, 1, 777, 2048, 5000, 2049, 33], [0, 0, 1, 70, 2047, 333, 2049, 40]
    check([torch.randn(3, n) for n in lengths], wanted, unit=unit, out_unit=out_unit)


@runs_kernel
@pytest.mark.parametrize("longest, share", [(5001, 0.01), (5001, 0.4), (5001, 1), (131_072, 0.4)])
def test_ties_go_to_the_earlier(longest: int, share: float) -> None:
    """Few values, of either sign, zeros of both, in several parts: more ties than are wanted."""
    torch.manual_seed(1)
    few = torch.tensor([-2.0, -0.0, 0.0, 1e-42, 0.25, 0.25, -1.0])
    scores = [few[torch.randint(len(few), (1, n))] for n in (5001, 50)] + [torch.zeros(1, 4200)]
    check(scores, [max(int(share * s.shape[1]), 1) for s in scores], longest=longest)


@runs_kernel
def test_whatever_float32_holds() -> None:
    """NaN above infinity, as in a sort; every bit of a number counts."""
    torch.manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (4, 3000)).int().view(torch.float32)
    bits[bits.isnan()] = torch.nan
    bits[0, 5::7], bits[1, ::2], bits[2, 3::5] = torch.nan, torch.inf, -torch.inf
    for count in (1, 400, 1600, 2999):
        check([bits], [count])
    close = (1.0 + torch.randperm(5000) * 2.0**-23)[None]
    check([close], [1234])


@runs_kernel
def test_values_in_place_of_indices() -> None:
    from vllm_kvplug.kernels.top_tokens import TopTokens

    scores, values = torch.rand(2, 1, 300), torch.randint(1000, (2, 1, 300), dtype=torch.int32)
    starts, out_starts = torch.tensor([0, 300, 600]), torch.tensor([0, 64, 128])
    numbers = (torch.full((2, 1), n, dtype=torch.int32, device=DEVICE) for n in (300, 20))
    out = torch.full((128,), POISON, dtype=torch.int32, device=DEVICE)
    given = scores.flatten().to(DEVICE), starts.int().to(DEVICE), 1, *numbers, values.flatten().to(DEVICE)
    TopTokens(2, 1, 300, torch.device(DEVICE)).choose(out, out_starts.int().to(DEVICE), 1, *given)
    expected = values.gather(-1, best(scores, 20).sort(-1).values)
    assert (out.view(2, 64)[:, :20].cpu() == expected[:, 0]).all() and (out.view(2, 64)[:, 20:] == POISON).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_the_largest_that_is_served() -> None:
    """64 rows of 8 heads, contexts up to 131,072, budgets up to 8,192; the same inside a captured graph."""
    from vllm_kvplug.kernels.top_tokens import TopTokens

    torch.manual_seed(3)
    rows, heads, longest = 64, 8, 131_072
    lengths = torch.randint(1, longest + 1, (rows,))
    lengths[:2] = longest
    wanted = (lengths // 16).clamp_min(1)
    starts, out_starts = starts_of(lengths.tolist(), 1).cuda(), starts_of(wanted.tolist(), 16).cuda()
    scores = torch.rand(int(lengths.sum()) * heads, device="cuda").square()
    of_rows = [n.int().cuda()[:, None].expand(-1, heads) for n in (lengths, wanted)]
    out = torch.empty(int(out_starts[-1]) * 16 * heads, dtype=torch.int32, device="cuda")
    top = TopTokens(rows, heads, longest, torch.device("cuda"))

    def run() -> None:
        top.choose(out, out_starts, 16, scores, starts, 1, *of_rows)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    scores.copy_(torch.rand_like(scores))  # what the graph sees, and the first run did not
    out.fill_(POISON)
    graph.replay()
    for row in (0, 1, 7, 63):
        begin, width, k = int(starts[row]) * heads, int(lengths[row]), int(wanted[row])
        expected = best(scores[begin : begin + heads * width].view(heads, width), k).sort(-1).values
        first, last = int(out_starts[row]) * 16 * heads, int(out_starts[row + 1]) * 16 * heads
        assert torch.equal(out[first:last].view(heads, -1)[:, :k].long(), expected)


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)

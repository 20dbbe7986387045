"""Selection of pages as CUDA does it, against the torch path: the same pages, in the same order."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import DEVICE, run_interpreted, runs_kernel, starts_interpreter

from vllm_kvplug import memory
from vllm_kvplug.memory import Geometry
from vllm_kvplug.placement.pool import PagePool
from vllm_kvplug.placement.tables import PageTables
from vllm_kvplug.policies.base import LocalWindow
from vllm_kvplug.policies.registry import make_policy
from vllm_kvplug.shape import ModelShape
from vllm_kvplug.worker.page_selection import Attended, AttendedLines, PageSelector
from vllm_kvplug.worker.requests import LiveRequest

SHAPE = ModelShape(2, 3, 6, 32, page_itemsize=4)
BLOCKS, ROWS = 150, 8


def selector_of(
    lengths: list[int], device: str, dtype: torch.dtype, local: int = 0
) -> tuple[PageSelector, list[LiveRequest]]:
    """One with pages of random keys, request i in slot 2 * i, and others' pages between its own.

    With `local` pages that are always attended to, the second head stores half of what the first does, the third less.
    """
    policy = make_policy("quest", {"ratio": 0.3, "dense_layers": 1}, SHAPE)
    geometry = Geometry.of_rank(SHAPE, 0, dtype, max_requests=ROWS, max_tokens=1200)
    tables = PageTables(geometry.table_sizes(BLOCKS, policy), device)
    pool = PagePool(torch.zeros(BLOCKS * 6, 16, 64, dtype=dtype, device=device))
    selector = PageSelector(1, geometry, pool, tables, ROWS, local)
    generator, free, requests = torch.Generator().manual_seed(0), torch.arange(1, BLOCKS), []
    for i, length in enumerate(lengths):
        row, free = free[: -(-length // 16)], free[-(-length // 16) :]
        place = tables.extend(2 * i, row.int()[None].to(device), 0, length, 0, 1 << 30)
        keys = torch.randn(length, 3, 32, generator=generator).to(dtype).to(device)
        selector.note(place[:, 3:], keys)
        if local:
            tables.lengths[2 * i, 3:] = torch.tensor([length, max(length // 2, 1), max(length // 3, 1)]).to(device)
        requests.append(LiveRequest(2 * i, length - 1, length - 1, policy, policy.plan()))
    return selector, requests


def pages_of(attended: Attended, row: int, head: int) -> list[int]:
    count = -(-int(attended.lengths[row, head]) // 16)
    return attended.chunks[attended.directory[row, head].long()].flatten()[:count].tolist()


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[1], [16, 1200, 17, 300], [700, 48, 90]], ids=str)
@pytest.mark.parametrize("local", [0, 2])
def test_pages_equal_those_of_torch(local: int, lengths: list[int], dtype: torch.dtype) -> None:
    """Padding rows attend to nothing; a request that is still its prompt attends to everything."""
    if dtype != torch.float32 and DEVICE == "cpu":
        pytest.skip("the interpreter knows no bfloat16")
    selector, requests = selector_of(lengths, "cpu", dtype, local)
    requests[0].prompt_len += 5
    query = torch.randn(len(lengths) + 2, 6, 32).to(dtype)
    slots = torch.tensor([*(request.slot for request in requests), -1, -1], dtype=torch.int32)
    selector.prepare(requests, lengths, len(slots))
    expected = selector.select(slots, 1, query)

    on_device, _ = selector_of(lengths, DEVICE, dtype, local)
    if on_device._lines is None:
        on_device._lines = AttendedLines(on_device.geometry, ROWS, BLOCKS, torch.device(DEVICE))
    lines = on_device._lines
    for room in (lines._scores, lines._chunks, lines._counts, lines._lengths):
        room.fill_(1 << 20)
    on_device.prepare(requests, lengths, len(slots))
    query, slots = query.to(DEVICE), slots.to(DEVICE)
    found = on_device.select(slots, 1, query)
    assert on_device.select(slots, 0, query) is None and found is not None
    assert found.row_slot.tolist() == [*range(len(lengths)), -1, -1]
    if expected is None:  # everything is attended to: as tables say
        assert found.lengths[0].tolist() == lengths * 3
        return
    if local:
        heads = [pages_of(expected, row, head) for row in range(len(lengths)) for head in range(3)]
        assert len({len(head) for head in heads}) > 1, "heads are alike"
    assert torch.equal(found.lengths[: len(lengths)].cpu(), expected.lengths[: len(lengths)])
    assert not found.lengths[len(lengths) :].any()
    for row in range(len(lengths)):
        for head in range(3):
            assert pages_of(found, row, head) == pages_of(expected, row, head)


@runs_kernel
def test_scores_that_are_no_numbers() -> None:
    """They count as the most there is, but for the newest page, as NaN in pages that nobody wrote would."""
    from vllm_kvplug.kernels.page_scores import MOST

    selector, requests = selector_of([200], DEVICE, torch.float32)
    lines = selector._lines = AttendedLines(selector.geometry, ROWS, BLOCKS, torch.device(DEVICE))
    page = selector.tables.chunks[selector.tables.directory[0, 3, 0], :3].long()
    selector.bounds[page[0], 0, 3], selector.bounds[page[1], :, 3] = torch.nan, torch.inf
    selector.bounds[page[2]] = -torch.inf  # times 0
    selector.prepare(requests, [200], 1)
    selector.select(torch.zeros(1, dtype=torch.int32, device=DEVICE), 1, torch.ones(1, 6, 32, device=DEVICE))
    scores = lines._scores[:13].tolist()
    assert scores[:3] == [MOST] * 3 and scores[12] == torch.inf
    assert all(-MOST < score < MOST for score in scores[3:12])


@runs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bounds_widen_as_in_torch(dtype: torch.dtype) -> None:
    """A page's first key and later ones, no two in one page, padding, and a key that is no number; strided tensors."""
    if dtype != torch.float32 and DEVICE == "cpu":
        pytest.skip("the interpreter knows no bfloat16")
    selector, _ = selector_of([200], "cpu", dtype)
    places = torch.tensor([[16, 45, 1000], [-1, -1, -1], [77, 160, 95], [63, 512, 2001]])
    keys = torch.randn(4, 4, 3, 32).to(dtype)[:, 1]
    keys[2, 0, 5] = torch.nan
    on_device, _ = selector_of([200], DEVICE, dtype)
    on_device._lines = AttendedLines(on_device.geometry, ROWS, BLOCKS, torch.device(DEVICE))
    selector.note(places, keys)
    strided = torch.zeros(4, 6, dtype=torch.int64)
    strided[:, 3:] = places
    on_device.note(strided.to(DEVICE)[:, 3:], keys.to(DEVICE), apart=True)
    torch.testing.assert_close(on_device.bounds[:-1].cpu(), selector.bounds[:-1], atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("local", [None, LocalWindow(32, 0.5)], ids=str)
def test_lines_take_no_more_than_is_charged(local: LocalWindow | None) -> None:
    pytest.importorskip("triton")
    policy, rows = make_policy("quest", {}, SHAPE), 300
    policy.local = local
    geometry = Geometry.of_rank(SHAPE, 0, torch.float32, rows, 4000)
    lines = AttendedLines(geometry, rows, 1000 if local is None else 250 * rows, torch.device("cpu"))
    top = lines._top
    room = [*vars(lines).values(), top._counts, top._above, top._state, torch.zeros(rows, dtype=torch.int32)]
    taken = sum(t.nbytes for t in room if isinstance(t, torch.Tensor))
    charged = memory.line_bytes(policy, geometry, rows) + 1000 * memory.line_bytes_per_block(policy, geometry)
    assert 0.99 * charged <= taken <= charged


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)

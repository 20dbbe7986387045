"""Rows between a pool and a device, and a lane of copies on CUDA."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplug import ops
from vllm_kvplug.tiers.lane import Lane

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLACES = [("cpu", "cpu"), *(pytest.param("cuda", place, marks=needs_gpu) for place in ("pinned", "cuda"))]


def a_pool(rows: int, row_bytes: int, place: str) -> torch.Tensor:
    pool = torch.randint(256, (rows, row_bytes), dtype=torch.uint8)
    return pool.pin_memory() if place == "pinned" else pool.to(place)


@pytest.mark.parametrize("device, place", PLACES)
@pytest.mark.parametrize("row_bytes", [1, 4, 68, 132, 256, 512, 1024, 1040])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 3001])
def test_rows_there_and_back(device: str, place: str, row_bytes: int, count: int) -> None:
    pool = a_pool(5000, row_bytes, place)
    before, rows = pool.cpu().clone(), torch.randperm(5000)[:count]
    found = torch.full((count, row_bytes), 77, dtype=torch.uint8, device=device)
    ops.gather_rows(found, pool, rows.to(device))
    assert torch.equal(found.cpu(), before[rows])
    other = 255 - found
    ops.scatter_rows(pool, other, rows.to(device))
    if device == "cuda":
        torch.cuda.synchronize()
    before[rows] = other.cpu()
    assert torch.equal(pool.cpu(), before)


def test_a_row_outside_the_pool() -> None:
    with pytest.raises(IndexError):
        ops.gather_rows(torch.empty(1, 4, dtype=torch.uint8), a_pool(3, 4, "cpu"), torch.tensor([3]))


@needs_gpu
@pytest.mark.parametrize("wrong", ["pageable", "dtype", "shape", "device"])
def test_refusals_on_cuda(wrong: str) -> None:
    pool, rows = a_pool(8, 16, "cpu" if wrong == "pageable" else "pinned"), torch.arange(4, device="cuda")
    out = torch.empty(4, 16 if wrong != "shape" else 8, dtype=torch.uint8, device="cuda")
    if wrong == "dtype":
        rows = rows.int()
    if wrong == "device":
        rows = rows.cpu()
    with pytest.raises(RuntimeError, match="gather_rows"):
        ops.gather_rows(out, pool, rows)


@needs_gpu
def test_a_lane_runs_beside_the_stream_and_in_order() -> None:
    """Its jobs see what was queued before them; the caller goes on, and what it joins is done."""
    lane, device = Lane(torch.device("cuda")), torch.device("cuda")
    source, staged = torch.zeros(1 << 22, device=device), torch.zeros(1 << 22, device=device)
    for value in range(1, 30):
        torch.cuda._sleep(200_000)
        source.fill_(value)
        ticket = lane.submit(lambda: staged.copy_(source), source, staged)
        waited = ticket.join()
        seen = staged[-1].clone()
        assert seen.item() == value
        assert waited() is not None
    lane.submit(lambda: torch.cuda._sleep(200_000_000))
    slow = lane.submit(lambda: staged.fill_(-1), staged)
    assert not slow.done
    slow.wait()
    assert slow.done and staged[0].item() == -1
    lane.close()

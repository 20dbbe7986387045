"""The background lane on a CPU: order, errors, and how much may wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from vllm_kvplug.tiers.lane import Lane


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane(torch.device("cpu"))
    yield lane
    lane.close()


def test_first_in_first_out(lane: Lane):
    """Far more jobs than may wait; each one's order is that of its submission."""
    done: list[int] = []
    count = 3 * Lane.MOST
    tickets = [lane.submit(lambda i=i: done.append(i)) for i in range(count)]
    tickets[-1].wait()
    assert done == list(range(count))
    assert all(ticket.done for ticket in tickets)


def test_a_job_runs_beside_its_caller(lane: Lane):
    gate, where = threading.Event(), []
    first = lane.submit(lambda: where.append(threading.current_thread()) or gate.wait(60))
    second = lane.submit(lambda: where.append(threading.current_thread()))
    assert not first.done and not second.done
    gate.set()
    second.wait()
    assert first.done and second.done
    assert where[0] is where[1] is not threading.current_thread()


def test_copies_reach_tensors_of_the_caller(lane: Lane):
    source, target = torch.arange(6.0), torch.zeros(6)
    lane.submit(lambda: target.copy_(source), source).wait()
    assert torch.equal(target, source)
    target += 1  # inference mode was the job's alone
    made: list[torch.Tensor] = []
    lane.submit(lambda: made.append(source * 2)).wait()
    assert made[0].is_inference()


def fail() -> None:
    raise ValueError("a copy went wrong")


def test_errors_surface_where_they_are_waited_for(lane: Lane):
    ticket = lane.submit(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="a copy went wrong"):
            ticket.wait()
    assert ticket.done


def test_errors_surface_at_a_later_job_too(lane: Lane):
    """Nobody waits for a store. Once; the lane goes on after it."""
    done: list[int] = []
    lane.submit(lambda: done.append(0))
    failed = lane.submit(fail)
    with pytest.raises(ValueError):
        failed.wait()
    with pytest.raises(ValueError, match="a copy went wrong"):
        lane.submit(lambda: done.append(1))
    lane.submit(lambda: done.append(2)).wait()
    assert done == [0, 2]


def test_jobs_that_wait_are_few(lane: Lane, monkeypatch: pytest.MonkeyPatch):
    """`submit` blocks when MOST wait: the first job sees no more of them, however long it takes."""
    monkeypatch.setattr(Lane, "MOST", 4)
    submitted, seen, all_in = [], [], threading.Event()
    tickets = []
    for i in range(12):
        job = (lambda: all_in.wait(0.5) or seen.append(len(submitted))) if i == 0 else (lambda: None)
        tickets.append(lane.submit(job))
        submitted.append(i)
    all_in.set()
    tickets[-1].wait()
    assert seen and seen[0] <= 4


def test_close_finishes_what_is_queued():
    lane, gate, done = Lane(torch.device("cpu")), threading.Event(), []
    lane.submit(lambda: gate.wait(60))
    for i in range(5):
        lane.submit(lambda i=i: done.append(i))
    gate.set()
    lane.close()
    assert done == list(range(5))
    with pytest.raises(RuntimeError):
        lane.submit(lambda: None)
    lane.close()

"""A background lane for work beside the model's own, such as copies between the device and the host; first in, first
out.

The order is what makes reuse safe: a slot or staging range that is given to a new owner is written by a later
job than every job of its old owner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

JUST_IN_TIME = 2e-5
"""Seconds between two events on CUDA that do not mean waiting."""


class Ticket(Protocol):
    """A job in a lane."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block until the job has finished; raises what it raised."""

    def join(self) -> Callable[[], float | None]:
        """Let what the caller does next, on CUDA what it queues next, begin after the job.

        Returns a function that says how many seconds that had to wait, or None while that is not known.
        """


class Lane:
    """One worker thread, or on CUDA a stream, on which jobs only queue work: they never wait for the device.

    Jobs see what was done, on CUDA queued, before `submit`. At most `MOST` jobs wait, so that the tensors they hold
    stay few: `submit` blocks until there is room.
    """

    MOST = 256

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvplug-lane") if not self._stream else None
        self._waiting: deque[Ticket] = deque()

    def submit(self, job: Callable[[], None], *inputs: torch.Tensor) -> Ticket:
        """Run `job` after all earlier ones. inputs: device tensors it reads that the caller may let go of."""
        while self._waiting and (self._waiting[0].done or len(self._waiting) >= self.MOST):
            self._waiting.popleft().wait()
        if self._pool:
            ticket: Ticket = _ThreadTicket(self._pool.submit(torch.inference_mode()(job)))
        else:
            ticket = self._queue(job, inputs)
        self._waiting.append(ticket)
        return ticket

    def _queue(self, job: Callable[[], None], inputs: tuple[torch.Tensor, ...]) -> Ticket:
        assert self._stream is not None
        for tensor in inputs:
            tensor.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            job()
        return _StreamTicket(self._stream.record_event(torch.cuda.Event()))

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        if self._pool:
            self._pool.shutdown(wait=True)
        elif self._stream:
            self._stream.synchronize()


class _ThreadTicket:
    def __init__(self, future: Future[None]):
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def join(self) -> Callable[[], float | None]:
        late, began = not self.done, time.perf_counter()
        self.wait()
        waited = time.perf_counter() - began if late else 0.0
        return lambda: waited


class _StreamTicket:
    def __init__(self, event: Any):
        self._event = event

    @property
    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def join(self) -> Callable[[], float | None]:
        stream = torch.cuda.current_stream()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        stream.wait_event(self._event)
        end.record(stream)

        def waited() -> float | None:
            if not end.query():
                return None
            seconds = begin.elapsed_time(end) / 1000
            return seconds if seconds > JUST_IN_TIME else 0.0

        return waited

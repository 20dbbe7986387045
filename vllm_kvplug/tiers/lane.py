"""A background lane for copies between the device and the host: first in, first out, beside the model's own work.

The order is what makes reuse safe: a slot or staging range that is given to a new owner is written by a later
job than every job of its old owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Lane:
    """One worker thread; on CUDA its copies run on a stream of their own, behind what was queued at `submit`.

    At most `MOST` jobs wait, so that the tensors they hold stay few: `submit` blocks until there is room.
    """

    MOST = 256

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvplug-lane")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: deque[Ticket] = deque()

    def submit(self, job: Callable[[], None], *inputs: torch.Tensor) -> Ticket:
        """Run `job` after all earlier ones. inputs: device tensors it reads that the caller may let go of."""
        while self._waiting and (self._waiting[0].done or len(self._waiting) >= self.MOST):
            self._waiting.popleft().wait()
        if self._stream is None:
            ticket = Ticket(self._pool.submit(torch.inference_mode()(job)))
        else:
            for tensor in inputs:
                tensor.record_stream(self._stream)
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
            ticket = Ticket(self._pool.submit(self._on_stream, job, ready))
        self._waiting.append(ticket)
        return ticket

    def _on_stream(self, job: Callable[[], None], ready: torch.cuda.Event) -> None:
        assert self._stream is not None
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            job()
            self._stream.synchronize()  # blocks this thread alone

    def close(self) -> None:
        """Finish what is queued, and end the thread."""
        self._pool.shutdown(wait=True)


class Ticket:
    """A job in a lane."""

    def __init__(self, future: Future[None]):
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Block until the job has finished; raises what it raised."""
        self._future.result()

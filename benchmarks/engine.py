"""Engines for measurements, one after another; on the CPU in this process, with their block pools in reach."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from vllm_kvplug import compat

# On CUDA only the end of a process gives all its memory back to the next engine.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if torch.version.cuda is None else "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))


engine = compat.llm

SHARED_GPU: dict[str, float] = (
    {} if torch.version.cuda is None else {"kv_cache_memory_bytes": 6 << 30, "gpu_memory_utilization": 0.1}
)
"""A pool of fixed size, for measurements of accuracy: several may run on one GPU, which no speed comes from."""

GRAPHS: dict[str, Any] = (
    {"enforce_eager": True}
    if torch.version.cuda is None
    else {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128],
        }
    }
)
"""Decode steps as captured graphs, on a GPU."""

PR_SET_PDEATHSIG = 1
"""Linux's prctl: the signal that a process gets when its parent dies."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What a job returned, or why it did not."""

    value: Result | None
    error: str | None = None


def side_by_side(
    jobs: Sequence[Callable[[], Result]], at_once: int, seconds: float | None = None
) -> Iterator[tuple[int, Outcome[Result]]]:
    """(number of a job, its outcome) as jobs end, `at_once` at a time in processes of their own, for which jobs must be
    such as can be pickled. What has not ended after `seconds` is killed and left out.

    Engines wait for the host most of the time, so several may share a GPU where nothing is timed.
    """
    spawn, waiting = multiprocessing.get_context("spawn"), deque(enumerate(jobs))
    running: dict[Any, tuple[int, Any]] = {}
    end = None if seconds is None else time.monotonic() + seconds
    folder = tempfile.TemporaryDirectory()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.popleft()
                receiver, sender = spawn.Pipe(duplex=False)
                # A large job in a pipe would hold this process up until the other one, its imports done, reads it.
                written = Path(folder.name) / str(number)
                written.write_bytes(pickle.dumps(job))
                process = spawn.Process(target=_tell, args=(written, sender))
                process.start()
                sender.close()
                running[receiver] = number, process
            ready = connection.wait(list(running), None if end is None else max(end - time.monotonic(), 0))
            if not ready:
                return
            for receiver in ready:
                number, process = running.pop(receiver)
                yield number, _heard(receiver, process)
    finally:
        for _, process in running.values():
            process.kill()
        folder.cleanup()


def apart(job: Callable[[], Result]) -> Result:
    """The result of a job in a process of its own, which gives all GPU memory back. RuntimeError if it fails."""
    ((_, outcome),) = side_by_side([job], 1)
    if outcome.error is not None:
        raise RuntimeError(outcome.error)
    return outcome.value  # type: ignore[return-value]


def _tell(written: Path, sender: Any) -> None:
    """Send a job's outcome, from its process, which must not outlive the command that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        sender.send(Outcome(pickle.loads(written.read_bytes())()))
    except Exception:
        sender.send(Outcome(None, traceback.format_exc()))


def _heard(receiver: Any, process: Any) -> Outcome[Any]:
    """What a process that has something to say, or has died, sent."""
    try:
        outcome = receiver.recv()
    except EOFError:
        outcome = None
    process.join(60)
    if process.is_alive():  # it has said all that it had to say
        process.kill()
        process.join()
    return outcome or Outcome(None, f"its process ended with exit code {process.exitcode}")


class Turns:
    """Many processes work side by side, or one is timed: locks on files in a folder that they share.

    A process that dies gives its locks back, and whoever waits to be timed comes before those that want to begin.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Beside others that do the same, and while nobody is timed."""
        with self._open("next") as turn, self._open("room") as room:
            while not _taken(turn):  # by somebody who is timed or waits for it
                time.sleep(0.5)
            fcntl.flock(room, fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
            try:
                yield
            finally:  # an engine's process that was forked meanwhile has the file open too
                fcntl.flock(room, fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Once all that began before have come to an end."""
        with self._open("next") as turn, self._open("room") as room:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(room, fcntl.LOCK_UN)
                fcntl.flock(turn, fcntl.LOCK_UN)

    def _open(self, name: str) -> Any:
        return (self._folder / name).open("w")


def _taken(file: Any) -> bool:
    """Whether a lock could be taken at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def decode_ms(stats: Sequence[Any], outputs: int) -> float:
    """Milliseconds per output token of a batch in which every request has `outputs`, from vLLM's times of its requests.

    Earlier requests of a batch decode while later prompts are computed; only what comes after counts.
    """
    last = max(stats, key=lambda s: s.first_token_ts)
    return 1000 * (last.last_token_ts - last.first_token_ts) / (outputs - 1)


def greedy(llm: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations of token-id prompts, all submitted at once."""
    outputs = compat.generate(llm, prompts, [max_tokens] * len(prompts), ignore_eos=True, detokenize=False)
    return [list(output.token_ids) for output in outputs]


def scheduler(llm: Any) -> Any:
    """The engine core's scheduler (in-process engines only)."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def worker(llm: Any) -> Any:
    """The only worker of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def runtime(llm: Any) -> Any:
    """The policy's runtime on it."""
    return worker(llm).runtime


def block_bytes(llm: Any) -> int:
    """Bytes of one vLLM block over all layers."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in config.kv_cache_groups)


def used_blocks(llm: Any) -> int:
    """Blocks in use in vLLM's pool (its null block is not counted)."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

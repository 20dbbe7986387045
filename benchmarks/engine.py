"""Engines for measurements, one after another; on the CPU in this process, with their block pools in reach."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

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
    {} if torch.version.cuda is None else {"kv_cache_memory_bytes": 9 << 30, "gpu_memory_utilization": 0.1}
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

Result = TypeVar("Result")


def side_by_side(jobs: Sequence[Callable[[], Result]], at_once: int) -> Iterator[Result]:
    """Results of jobs in their order: in this process, or `at_once` at a time in processes of their own, for which jobs
    must be such as can be pickled.

    Engines wait for the host most of the time, so several may share a GPU where nothing is timed.
    """
    if at_once == 1:
        yield from (job() for job in jobs)
        return
    with _processes(at_once) as pool:
        yield from (future.result() for future in [pool.submit(job) for job in jobs])


def apart(job: Callable[[], Result]) -> Result:
    """The result of a job in a process of its own, which gives all GPU memory back."""
    with _processes(1) as pool:
        return pool.submit(job).result()


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def greedy(llm: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations of token-id prompts, all submitted at once."""
    outputs = compat.generate(llm, prompts, [max_tokens] * len(prompts), ignore_eos=True, detokenize=False)
    return [list(output.token_ids) for output in outputs]


def scheduler(llm: Any) -> Any:
    """The engine core's scheduler (in-process engines only)."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def runtime(llm: Any) -> Any:
    """The policy's runtime on the only worker of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.runtime


def block_bytes(llm: Any) -> int:
    """Bytes of one vLLM block over all layers."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return sum(g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in config.kv_cache_groups)


def used_blocks(llm: Any) -> int:
    """Blocks in use in vLLM's pool (its null block is not counted)."""
    pool = scheduler(llm).kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()

"""Random requests against a pool and a host tier that are too small, under a policy that keeps something on the host.

    python -m benchmarks.soak --out FILE [--policy heterocache] [--requests 300] [--seed 0]

Requests of 1 to 1,500 tokens come at random with random options (budget, protected ranges, off), and some are
aborted at a random step. After every step all pages that belong to nobody are filled with NaN, and those that
were so before must still be: whoever writes to a freed page is found, and whoever reads one gets NaN. At the end
nothing may be left, and every request that was completed must have the tokens of its run alone in a roomy engine;
one that was preempted, of runs alone that begin where it began anew.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import report
from benchmarks.drift_model import make_model, write_profile
from benchmarks.engine import engine, runtime, scheduler
from vllm_kvplug.metrics import PREFIX
from vllm_kvplug.tiny import VOCAB, random_gate

MAX_LEN, MOST_TOKENS = 1616, 110
BLOCKS = 112  # two long requests do not fit
HOST_GIB = {"heterocache": 0.0034, "yakv": 0.0009, "fastkvzip+yakv": 0.0004, "wgkv+yakv": 0.0009}
"""Nor does what they keep on the host."""
KNOBS = {
    "heterocache": {"rho": 0.6, "tau_drift": 0.42, "land_after": 2, "fetch_mib_per_step": 0.25},
    "yakv": {"ratio": 0.1, "sinks": 2, "local": 32},
    "fastkvzip+yakv": {"ratio": 0.2, "offload": 0.4, "fetch": 0.1, "window": 32, "cut_every": 400},
    "wgkv+yakv": {"ratio": 0.2, "tau": 0.5, "window": 32, "cut_every": 400},
}


@dataclass
class Job:
    """A request of the soak, and what became of it. ends: tokens at which its prompt was complete, each time."""

    prompt: list[int]
    tokens: int
    options: dict[str, Any]
    arrives: int
    aborted_after: int | None
    request_id: str = ""
    ends: list[int] = field(default_factory=list)
    answer: list[int] | None = None
    refused: bool = False


def random_jobs(count: int, seed: int, budgets: bool = True) -> list[Job]:
    """budgets: whether requests may ask for one of their own, or for none."""
    draw, step, jobs = random.Random(seed), 0, []
    for _ in range(count):
        step += draw.choice([0, 0, 1, 2, draw.randrange(20)])
        length = draw.choice(
            [draw.randint(1, 40), draw.randint(1, 400), draw.randint(1, 1500), draw.choice([256, 257])]
        )
        jobs.append(
            Job(
                prompt=[draw.randrange(VOCAB) for _ in range(length)],
                tokens=draw.randint(1, MOST_TOKENS),
                options=random_options(draw, length, budgets),
                arrives=step,
                aborted_after=draw.randrange(60) if draw.random() < 0.15 else None,
            )
        )
    return jobs


def random_options(draw: random.Random, length: int, budgets: bool) -> dict[str, Any]:
    kind = draw.randrange(8)
    if kind == 0 and budgets:
        return {"kvplug.off": True}
    options: dict[str, Any] = {"kvplug.budget": draw.choice([0.4, 0.5, 0.8, 1.0])} if kind <= 3 and budgets else {}
    if kind in (3, 4) and length > 2:
        start = draw.randrange(length - 1)
        options["kvplug.protect"] = [start, draw.randint(start + 1, min(length, start + 200))]
    if kind == 5:
        options["kvplug.protect"] = [0, length + 1]  # refused
    return options


@contextmanager
def soaked_engine(model: Path, policy: str, **limits: Any) -> Iterator[Any]:
    common = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "max_model_len": MAX_LEN}
    knobs = {**KNOBS[policy], "host_gib": limits.pop("host_gib")}
    if policy == "heterocache":
        knobs["profile"] = str(write_profile(model, model.parent / "profile.json"))
    if policy in ("fastkvzip+yakv", "wgkv+yakv"):
        knobs["gate"] = str(random_gate(model, model.parent / "gate.safetensors", policy.partition("+")[0]))
    with engine(str(model), **common, kv_policy=policy, kv_policy_config=knobs, **limits) as llm:
        yield llm


class Poison:
    """Fills blocks that belong to nobody with NaN, and counts those that are written to all the same."""

    def __init__(self, llm: Any):
        self.pool, self.manager = runtime(llm).pool, scheduler(llm)._head_pages
        self.heads = runtime(llm).geometry.heads
        self.blocks = len(self.pool.pages) // self.heads
        self.poisoned: set[int] = set()
        self.writes = 0
        get_new_blocks = self.manager.block_pool.get_new_blocks

        def watched(count: int) -> list[Any]:
            blocks = get_new_blocks(count)
            self.poisoned -= {b.block_id for b in blocks}  # a request may come and go within a step
            return blocks

        self.manager.block_pool.get_new_blocks = watched

    def check(self) -> None:
        used = {b.block_id for row in self.manager.req_to_blocks.values() for b in row}
        free = set(range(1, self.blocks)) - used
        pages = self.pool.pages.view(self.blocks, -1)
        still = sorted(free & self.poisoned)
        self.writes += int((~pages[still].isnan()).any(1).sum()) if still else 0
        pages[sorted(free)] = torch.nan
        self.poisoned = free


def add(llm: Any, name: str, job: Job) -> bool:
    """Submit a job; False if it is refused."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=job.tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=job.options or None,
    )
    known = set(scheduler(llm).requests)
    try:
        llm.llm_engine.add_request(name, {"prompt_token_ids": job.prompt}, params)
    except ValueError:
        return False
    (job.request_id,) = scheduler(llm).requests.keys() - known
    return True


def serve(llm: Any, jobs: list[Job]) -> dict[str, int]:
    """Run all jobs to their ends; what was counted on the way."""
    counted = {"preemptions": 0, "waits_for_host": 0, "steps": 0}
    core, manager, poison = llm.llm_engine, scheduler(llm)._head_pages, Poison(llm)
    begin_step, take_counts, by_id = runtime(llm).begin_step, runtime(llm).take_counts, {}

    def watched_begin(lifecycle: Any) -> None:
        for request_id, admission in lifecycle.admitted.items():
            by_id[request_id].ends.append(admission.prefill_end)
        begin_step(lifecycle)

    def watched_counts() -> dict[str, int]:
        found = take_counts()
        for name, count in found.items():
            counted[name.removeprefix(PREFIX)] = counted.get(name.removeprefix(PREFIX), 0) + count
        return found

    runtime(llm).begin_step, runtime(llm).take_counts = watched_begin, watched_counts
    waiting, progress = list(enumerate(jobs)), tqdm(total=len(jobs), desc="soak")
    while waiting or core.has_unfinished_requests():
        step = counted["steps"]
        while waiting and waiting[0][1].arrives <= step:
            index, job = waiting.pop(0)
            job.refused = not add(llm, str(index), job)
            by_id[job.request_id] = job
        for index, job in enumerate(jobs):
            if job.request_id and job.aborted_after is not None and job.arrives + job.aborted_after == step:
                core.abort_request([str(index)])
        for output in core.step():
            jobs[int(output.request_id)].answer = list(output.outputs[0].token_ids)
            progress.update()
        head = next(iter(scheduler(llm).waiting), None)
        if head is not None and not manager.host.fits(manager._host_slots(head.request_id)):
            counted["waits_for_host"] += 1
        poison.check()
        counted["steps"] += 1
        assert step < 100_000, "the engine makes no progress"
    core.step()  # the worker hears of the last ends
    counted["preemptions"] = sum(max(len(job.ends) - 1, 0) for job in jobs)
    counted["freed_page_writes"] = poison.writes
    return counted


def left_behind(llm: Any) -> dict[str, int]:
    """Blocks, host slots, staging ranges and worker slots that are still taken."""
    state, pool = runtime(llm), scheduler(llm).kv_cache_manager.block_pool
    return {
        "leaked_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "leaked_host_slots": state.offloader.host.used + scheduler(llm)._head_pages.host.used,
        "leaked_staging": len(state.retriever.staging._taken) if state.retriever else 0,
        "leaked_requests": len(state.live),
    }


def alone(llm: Any, job: Job, start: int, stop: int) -> list[int]:
    """Tokens `start` to `stop` of a job whose prompt and first `start` tokens are one prompt."""
    assert job.answer is not None
    part = Job(job.prompt + job.answer[:start], stop - start, job.options, 0, None)
    serve_one = add(llm, "alone", part)
    assert serve_one
    while True:
        for output in llm.llm_engine.step():
            return list(output.outputs[0].token_ids)


def mismatched(llm: Any, jobs: list[Job]) -> list[int]:
    """Indices of completed jobs whose tokens are not those of their runs alone."""
    wrong = []
    for index, job in enumerate(tqdm(jobs, desc="alone")):
        if job.answer is None or len(job.answer) < job.tokens:
            continue
        starts = sorted({end - len(job.prompt) for end in job.ends})
        for start, stop in zip(starts, [*starts[1:], job.tokens], strict=True):
            if stop > start and alone(llm, job, start, stop) != job.answer[start:stop]:
                wrong.append(index)
                break
    return wrong


def soak(count: int, seed: int, policy: str = "heterocache") -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics, and a row for every mismatched job."""
    jobs = random_jobs(count, seed, budgets=policy != "wgkv+yakv")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        limits = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 8, "max_num_batched_tokens": 256}
        with soaked_engine(model, policy, host_gib=HOST_GIB[policy], **limits) as llm:
            counted = {**serve(llm, jobs), **left_behind(llm)}
        with soaked_engine(model, policy, host_gib=0.05, max_num_seqs=8, max_num_batched_tokens=256) as llm:
            wrong = mismatched(llm, jobs)
    completed = [job for job in jobs if job.answer is not None and len(job.answer) == job.tokens]
    metrics = {"requests": count, "completed": len(completed), "refused": sum(job.refused for job in jobs)}
    metrics |= {"mismatched_requests": len(wrong), **counted}
    rows = [{"job": i, "prompt": len(jobs[i].prompt), "options": jobs[i].options, "ends": jobs[i].ends} for i in wrong]
    return {f"soak.{name}": value for name, value in metrics.items()}, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--policy", choices=list(KNOBS), default="heterocache")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report.write(args.out, report.result("soak", *soak(args.requests, args.seed, args.policy)))


if __name__ == "__main__":
    main()

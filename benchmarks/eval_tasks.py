"""Scores of context-intensive tasks under a policy, relative to full attention on the same examples.

    python -m benchmarks.eval_tasks MODEL --tasks tasks.py --out FILE [--tokens 1024] [--examples 16]
        [--run NAME=POLICY:JSON ...] [--multiquery] [--at-once N] [--seconds S] [--timed N]

tasks.py gives TASKS, counter(model), make(task, tokens, seed, i, split, counter) and score(task, meta, output,
answer). rel is the mean over tasks of (mean score of the policy / mean score of full attention), with a paired
bootstrap interval over examples; gpu_kv_ratio the GPU bytes of blocks and page tables while requests decode, relative
to full attention's; tpot_ms that of N requests at once, while no other engine of this command works. With --multiquery
policies cut the context before they see the question, which are the last meta["question_chars"] characters of the
message: what they keep must serve any question. Runs of `oracle` find the scores of their prompts where
`python -m benchmarks.oracle_scores` has put them, for the same examples.

The same command goes on where it stopped, or was stopped by --seconds, and more runs can be added to a file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine import (
    GRAPHS,
    SHARED_GPU,
    Turns,
    block_bytes,
    decode_ms,
    engine,
    runtime,
    scheduler,
    side_by_side,
)
from benchmarks.lanes import Found, Lane, full_lane, measure
from vllm_kvplug import compat
from vllm_kvplug.eval.prompts import WITHOUT_CONTEXT_END, chat_ids, context_tokens
from vllm_kvplug.policies.oracle import Oracle, scores_name

Runs = dict[str, tuple[str, dict[str, Any]]]
"""Policy and knobs by the name of a run."""

RUNS: Runs = {
    "heterocache_rho50": ("heterocache", {"rho": 0.5}),
    "heterocache_rho50_no_retrieval": ("heterocache", {"rho": 0.5, "host_gib": 0}),
    "snapkv_50": ("snapkv", {"ratio": 0.5}),
    "random_50": ("random", {"ratio": 0.5}),
    "streaming_512": ("streaming", {"sinks": 4, "window": 508}),
}

LOOK_EVERY = 4
"""Steps from one look at what requests hold to the next, which costs about as much as a small model's step."""

MANY = 20
"""Examples of a task from which on every task's are made in a process of its own: a tenth of a second each."""

TIMED_TOKENS = 65
"""Output tokens of requests that are timed."""


def load_tasks(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("eval_tasks_source", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def examples(tasks: Any, tokenizer: Any, model: str, tokens: int, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` examples of each task, with the chat-formatted prompt and a bound on the answer."""
    counter = tasks.counter(model)
    made = [tasks.make(task, tokens, seed, i, "eval", counter) for task in tasks.TASKS for i in range(count)]
    for example in made:
        example["ids"] = chat_ids(tokenizer, example["prompt_messages"])
        example["max_tokens"] = int(len(tokenizer(example["answer"])["input_ids"]) * 1.25) + 16
    return made


@lru_cache(maxsize=4)
def asked_of(path: Path, only: tuple[str, ...], model: str, tokens: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Examples of a task file, not to be changed: runs share them."""
    tasks = load_tasks(path)
    tasks.TASKS = only
    return examples(tasks, load_tokenizer(model), model, tokens, count, seed)


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def context_end(tokenizer: Any, example: dict[str, Any]) -> int:
    """How many of a prompt's first tokens do not depend on the question."""
    messages = example["prompt_messages"]
    return context_tokens(tokenizer, messages, len(messages[-1]["content"]) - example["meta"]["question_chars"])


class Held(compat.HeldMemory):
    """Also what the policy of the engine stores, and has reserved on the host."""

    def __init__(self, llm: Any, policy: str | None):
        super().__init__(llm)
        self._runtime = runtime(llm) if policy else None
        self._block_bytes = block_bytes(llm) + (self._runtime.charges.per_block if self._runtime else 0)
        self._block_size = scheduler(llm).cache_config.block_size
        self._stored, self._host_bytes, self._steps = 0.0, list[float](), 0

    def look(self) -> None:
        self._steps += 1
        if self._steps % LOOK_EVERY:
            return
        super().look()
        decoding = self.decoding()
        if self._runtime is None or not decoding:
            return
        lengths = self._runtime.tables.lengths[[self._runtime.live[r.request_id].slot for r in decoding]]
        self._stored += lengths.sum().item() / lengths.shape[1]
        (manager,) = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        self._host_bytes.append(manager.gauges().get("kvplug.host_used_bytes", 0) / len(self._scheduler.running))

    @property
    def found(self) -> dict[str, Any]:
        return {
            "held_bytes": self.share * self._block_bytes / self._block_size,
            "host_bytes": fmean(self._host_bytes) if self._host_bytes else 0.0,
            "stored_ratio": self._stored / self.tokens if self._runtime else None,
        }


@dataclass(frozen=True)
class Examination:
    """A model and the examples it is asked, the same for every run.

    only: tasks, all if empty. multiquery: without a look at the questions. at_once: engines that run side by side.
    timed: requests that decode together to be timed, none if 0.
    """

    model: str
    tasks: Path
    tokens: int
    examples: int
    seed: int
    dtype: str
    concurrent: int
    only: tuple[str, ...] = ()
    at_once: int = 1
    multiquery: bool = False
    timed: int = 0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, examples: int) -> None:
        """All but --tokens, of which some commands take several."""
        parser.add_argument("model")
        parser.add_argument("--tasks", type=Path, required=True)
        parser.add_argument("--examples", type=int, default=examples)
        parser.add_argument("--seed", type=int, default=9001)
        parser.add_argument("--dtype", default="float32")
        parser.add_argument("--concurrent", type=int, default=16, help="requests at once")
        parser.add_argument("--at-once", type=int, default=1, help="engines that share one GPU")
        parser.add_argument("--only", nargs="+", default=[], metavar="TASK", help="default: all")

    @classmethod
    def of(cls, args: argparse.Namespace, tokens: int, multiquery: bool = False, timed: int = 0) -> Examination:
        numbers, only = (tokens, args.examples, args.seed), tuple(args.only)
        return cls(args.model, args.tasks, *numbers, args.dtype, args.concurrent, only, args.at_once, multiquery, timed)

    @property
    def key(self) -> str:
        return f"{'multiquery' if self.multiquery else 'eval'}{self.tokens}"

    @cached_property
    def task_list(self) -> list[str]:
        return list(self.only or load_tasks(self.tasks).TASKS)

    @property
    def about(self) -> dict[str, Any]:
        """What its scores depend on, but for the code."""
        model, numbers = Path(self.model).name, {"tokens": self.tokens, "examples": self.examples, "seed": self.seed}
        rest = {"dtype": self.dtype, "multiquery": self.multiquery, "timed": self.timed}
        return {"model": model, "tasks": self.task_list, **numbers, **rest}

    @cached_property
    def asked(self) -> list[dict[str, Any]]:
        """The examples; once made they travel with this object to other processes."""
        rest = self.model, self.tokens, self.examples, self.seed
        if self.examples < MANY:
            return asked_of(self.tasks, tuple(self.task_list), *rest)
        jobs = [partial(asked_of, self.tasks, (task,), *rest) for task in self.task_list]
        made = [outcome for _, outcome in sorted(side_by_side(jobs, os.cpu_count() or 1), key=lambda pair: pair[0])]
        if errors := [outcome.error for outcome in made if outcome.error]:
            raise RuntimeError(errors[0])
        return [example for outcome in made for example in outcome.value or ()]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of every run's engine."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": 2 * self.tokens,
            "max_num_seqs": self.concurrent,
            "max_num_batched_tokens": max(2048, self.tokens),
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            **GRAPHS,
            **SHARED_GPU,
        }

    def options(self, policy: str | None) -> list[dict[str, Any]]:
        """What a run under `policy` asks for with every example."""
        options: list[dict[str, Any]] = [{} for _ in self.asked]
        if self.multiquery and policy is not None and policy not in WITHOUT_CONTEXT_END:
            tokenizer = load_tokenizer(self.model)
            for given, example in zip(options, self.asked, strict=True):
                given["kvplug.context_end"] = context_end(tokenizer, example)
        if policy == Oracle.name:
            for given, example in zip(options, self.asked, strict=True):
                given["kvplug.scores"] = scores_name(example["ids"])
        return options

    def run(self, policy: str | None, knobs: dict[str, Any], turns: Turns) -> Found:
        """Ask the examples in an engine with this policy; in a process of its own, whose scheduler is looked at."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        given = {"kv_policy": policy, "kv_policy_config": knobs} if policy else {}
        with ExitStack() as stack:
            with turns.together():
                tasks, asked, options = load_tasks(self.tasks), self.asked, self.options(policy)
                llm = stack.enter_context(engine(**self.arguments, **given))
                held = Held(llm, policy)
                limits = [example["max_tokens"] for example in asked]
                found = compat.generate(llm, [e["ids"] for e in asked], limits, lambda _: held.look(), options)
                counted = policy_counts(llm) if policy else {}
            with turns.alone() if self.timed else nullcontext():
                tpot_ms = self._time(llm, asked, options) if self.timed else None
        pairs = zip(asked, found, strict=True)
        scores = [tasks.score(e["task"], e["meta"], answer.text, e["answer"]) for e, answer in pairs]
        return Found(scores, fmean(len(e["ids"]) for e in asked), **held.found, tpot_ms=tpot_ms, counted=counted)

    def _time(self, llm: Any, asked: list[dict[str, Any]], options: list[dict[str, Any]]) -> float:
        """Milliseconds per output token of `timed` requests at once, after a first round that warms up."""
        from vllm import SamplingParams

        chosen = [(number * len(asked) // self.timed) % len(asked) for number in range(self.timed)]
        prompts = [{"prompt_token_ids": asked[number]["ids"]} for number in chosen]
        common = {"temperature": 0, "max_tokens": TIMED_TOKENS, "ignore_eos": True, "detokenize": False}
        params = [SamplingParams(**common, extra_args=options[number] or None) for number in chosen]
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return decode_ms([output.metrics for output in outputs], TIMED_TOKENS)


def policy_counts(llm: Any) -> dict[str, float]:
    """What the policy has counted in this engine, by metric name."""
    values = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:kvplug_")}
    return {name.removeprefix("vllm:kvplug_"): value for name, value in values.items()}


def lanes_of(examination: Examination, runs: Runs, key: str | None = None) -> list[Lane]:
    """An engine for full attention and for every run; key: of metrics' names, the examination's if None."""
    key = key or examination.key
    return [full_lane(key, examination), *(Lane(key, name, *run, examination) for name, run in runs.items())]


def read_runs(given: list[str]) -> Runs:
    """Of NAME=POLICY:JSON."""
    parts = [(r.split("=", 1)[0], *r.split("=", 1)[1].split(":", 1)) for r in given]
    return {name: (policy, json.loads(knobs)) for name, policy, knobs in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, examples=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", nargs="*", default=[], help="NAME=POLICY:JSON, instead of the standard runs")
    parser.add_argument("--multiquery", action="store_true", help="contexts are cut before questions are seen")
    parser.add_argument("--timed", type=int, default=0, metavar="N", help="requests at once to time; 0: none")
    parser.add_argument("--seconds", type=float, help="leave out what has not ended by then")
    args = parser.parse_args()
    runs = read_runs(args.run) or RUNS
    examination = Examination.of(args, args.tokens, args.multiquery, args.timed)
    measure(lanes_of(examination, runs), args.out, args.seconds)


if __name__ == "__main__":
    main()

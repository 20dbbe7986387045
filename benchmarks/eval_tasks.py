"""Scores of context-intensive tasks under a policy, relative to full attention on the same examples.

    python -m benchmarks.eval_tasks MODEL --tasks tasks.py --out FILE [--tokens 1024] [--examples 16]
        [--run NAME=POLICY:JSON ...] [--multiquery] [--at-once N]

tasks.py gives TASKS, counter(model), make(task, tokens, seed, i, split, counter) and score(task, meta, output,
answer). rel is the mean over tasks of (mean score of the policy / mean score of full attention), with a paired
bootstrap interval over examples. With --multiquery policies cut the context before they see the question, which are the
last meta["question_chars"] characters of the message: what they keep must serve any question. Runs of `oracle` find the
scores of their prompts where `python -m benchmarks.oracle_scores` has put them, for the same examples.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os.path import commonprefix
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import report
from benchmarks.engine import GRAPHS, SHARED_GPU, engine, side_by_side
from vllm_kvplug.eval.scoring import interval, relative
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


WITHOUT_PROMPT_END = ("streaming", "wgkv", "wgkv+snapkv")
"""Policies that treat a context as they treat a question, and so have no option to tell one from the other."""


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


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def context_tokens(tokenizer: Any, example: dict[str, Any]) -> int:
    """How many of a prompt's first tokens do not depend on the question."""
    *before, last = example["prompt_messages"]
    context = last["content"][: -example["meta"]["question_chars"]]
    return len(commonprefix([example["ids"], chat_ids(tokenizer, [*before, {**last, "content": context}])]))


def answers(llm: Any, asked: list[dict[str, Any]], options: list[dict[str, Any]]) -> list[Any]:
    """Greedy answers as vLLM's CompletionOutputs. options: of each request, none if empty."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": e["ids"]} for e in asked]
    params = [
        SamplingParams(temperature=0, max_tokens=e["max_tokens"], extra_args=extra or None)
        for e, extra in zip(asked, options, strict=True)
    ]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


@dataclass(frozen=True)
class Examination:
    """A model and the examples it is asked, the same for every run.

    only: tasks, all if empty. multiquery: without a look at the questions. at_once: engines that run side by side.
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

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, tokens: int, examples: int) -> None:
        parser.add_argument("model")
        parser.add_argument("--tasks", type=Path, required=True)
        parser.add_argument("--tokens", type=int, default=tokens)
        parser.add_argument("--examples", type=int, default=examples)
        parser.add_argument("--seed", type=int, default=9001)
        parser.add_argument("--dtype", default="float32")
        parser.add_argument("--concurrent", type=int, default=16, help="requests at once")
        parser.add_argument("--at-once", type=int, default=1, help="engines that share one GPU")
        parser.add_argument("--only", nargs="+", default=[], metavar="TASK", help="default: all")

    @classmethod
    def of(cls, args: argparse.Namespace) -> Examination:
        numbers = args.tokens, args.examples, args.seed
        return cls(args.model, args.tasks, *numbers, args.dtype, args.concurrent, tuple(args.only), args.at_once)

    @cached_property
    def source(self) -> tuple[Any, Any, list[dict[str, Any]]]:
        """The module of tasks, the tokenizer, and the examples."""
        from transformers import AutoTokenizer

        tasks, tokenizer = load_tasks(self.tasks), AutoTokenizer.from_pretrained(self.model)
        tasks.TASKS = self.only or tasks.TASKS
        return tasks, tokenizer, examples(tasks, tokenizer, self.model, self.tokens, self.examples, self.seed)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of every run's engine."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "max_model_len": 2 * self.tokens,
            "max_num_seqs": self.concurrent,
            "max_num_batched_tokens": max(2048, self.tokens),
            **GRAPHS,
            **SHARED_GPU,
        }

    def options(self, policy: str | None, example: dict[str, Any]) -> dict[str, Any]:
        """What a run under `policy` asks for with an example."""
        found: dict[str, Any] = {}
        if self.multiquery and policy is not None and policy not in WITHOUT_PROMPT_END:
            found["kvplug.context_end"] = context_tokens(self.source[1], example)
        if policy == Oracle.name:
            found["kvplug.scores"] = scores_name(example["ids"])
        return found

    def run(self, policy: str | None, knobs: dict[str, Any]) -> tuple[list[float], dict[str, float]]:
        """Scores of the examples in an engine with this policy, and what that has counted."""
        tasks, _, asked = self.source
        given = {} if policy is None else {"kv_policy": policy, "kv_policy_config": knobs, "disable_log_stats": False}
        with engine(**self.arguments, **given) as llm:
            found = answers(llm, asked, [self.options(policy, e) for e in asked])
            counted = policy_counts(llm) if policy else {}
        pairs = zip(asked, found, strict=True)
        return [tasks.score(e["task"], e["meta"], answer.text, e["answer"]) for e, answer in pairs], counted

    def measure(self, key: str, runs: Runs, out: Path) -> None:
        """Scores of full attention, then of every run; written to `out` after each, so that a stop loses one only."""
        asked = self.source[-1]
        names = [e["task"] for e in asked]
        picklable = replace(self)  # has no examples yet, and makes the same
        jobs = [partial(picklable.run, *given) for given in [(None, {}), *runs.values()]]
        results = side_by_side(jobs, self.at_once)
        full, _ = next(results)
        metrics = {f"{key}.full.mean": fmean(full), f"{key}.examples": len(asked)}
        rows = [_row("full", names, full, asked)]
        for (name, (policy, knobs)), (found, counted) in zip(runs.items(), results, strict=True):
            low, high = interval(names, found, full)
            metrics |= {f"{key}.{name}.rel": relative(names, found, full), f"{key}.{name}.mean": fmean(found)}
            metrics |= {f"{key}.{name}.rel_low": low, f"{key}.{name}.rel_high": high}
            rows.append({**_row(name, names, found, asked), "policy": policy, "knobs": knobs, "counted": counted})
            print(name, f"rel {metrics[f'{key}.{name}.rel']:.3f} [{low:.3f}, {high:.3f}]", flush=True)
            report.write(out, report.result(f"{key} {self.dtype}", metrics, rows))


def policy_counts(llm: Any) -> dict[str, float]:
    """What the policy has counted in this engine, by metric name."""
    values = {m.name: m.value for m in llm.get_metrics() if m.name.startswith("vllm:kvplug_")}
    return {name.removeprefix("vllm:kvplug_"): value for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Examination.add_arguments(parser, tokens=1024, examples=16)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", nargs="*", default=[], help="NAME=POLICY:JSON, instead of the standard runs")
    parser.add_argument("--multiquery", action="store_true", help="contexts are cut before questions are seen")
    args = parser.parse_args()
    runs = RUNS
    if args.run:
        parts = [(r.split("=", 1)[0], *r.split("=", 1)[1].split(":", 1)) for r in args.run]
        runs = {name: (policy, json.loads(knobs)) for name, policy, knobs in parts}
    key = f"{'multiquery' if args.multiquery else 'eval'}{args.tokens}"
    replace(Examination.of(args), multiquery=args.multiquery).measure(key, runs, args.out)


def _row(name: str, names: list[str], found: list[float], asked: list[dict[str, Any]]) -> dict[str, Any]:
    by_task = {t: round(fmean(s for n, s in zip(names, found, strict=True) if n == t), 4) for t in dict.fromkeys(names)}
    by_task["scores"] = [round(s, 4) for s in found]
    return {"run": name, **by_task, "prompt_tokens": round(fmean(len(e["ids"]) for e in asked), 1)}


if __name__ == "__main__":
    main()

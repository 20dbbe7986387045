"""`kvplug eval`: scores of policies on context-intensive tasks, with intervals, beside the memory they keep."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvplug import spread
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval import fidelity, report
from vllm_kvplug.eval.fidelity import Continuation

DECODED = 64
"""Tokens that fidelity runs decode after each piece of text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="model folder or Hugging Face id; with --server, its tokenizer")
    parser.add_argument(
        "--policies", required=True, metavar="LIST", help="full,NAME@X,'NAME:JSON',... with X as the policy's budget"
    )
    parser.add_argument("--tasks", metavar="LIST", help="default: all")
    parser.add_argument("--tokens", default="1024", metavar="LIST", help="lengths of examples (default %(default)s)")
    parser.add_argument("--n", type=int, default=40, metavar="N", help="examples per task (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--multiquery",
        action="store_true",
        help="cut contexts before their questions are seen: what is kept must serve any question",
    )
    parser.add_argument("--server", metavar="URL", help="a running server, instead of engines in turn")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    parser.add_argument("--fidelity", type=Path, metavar="FILE", help="also compare distributions on this text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results; a rerun goes on with them")
    spread.add_argument(parser)


def run(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from vllm_kvplug.eval import runner, tasks

    policies, lengths = split(args.policies), [_length(text) for text in split(args.tokens)]
    chosen = split(args.tasks) if args.tasks else list(tasks.TASKS)
    for policy in policies:  # what is wrong is said before the first engine starts
        if args.server:
            runner.request_options(policy)
        elif policy != runner.FULL:
            runner.read_policy(policy)
    if args.server and args.fidelity:
        raise PolicyError("--fidelity needs engines of its own: remove --server")
    if args.fidelity and any(runner.is_oracle(policy) for policy in policies):
        raise PolicyError("--fidelity continues texts, for which oracle has no scores: remove it from --policies")
    if args.server and args.ray is not None:
        raise PolicyError("--ray spreads engines, and a server is one already: remove --ray or --server")
    workers = spread.spread(args.ray)
    settings = {"model": args.model, "tasks": chosen, "n": args.n, "seed": args.seed, "server": bool(args.server)}
    settings |= {"engine": args.engine, "multiquery": args.multiquery}
    results = report.Results(args.out, settings)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    backend: Any = runner.Engines(args.model, args.engine, args.multiquery, args.out.absolute() / "scores")
    if args.server:
        backend = runner.Server(args.server, tokenizer, args.multiquery)
    devices = args.engine.get("tensor_parallel_size", 1)
    evaluation = _Evaluation(workers, devices, backend, policies, results)
    examples = {tokens: list(_examples(chosen, tokens, args, tokenizer)) for tokens in lengths}
    try:
        evaluation.score(examples)
        if args.fidelity:
            evaluation.compare(args.fidelity, lengths, tokenizer)
    finally:  # also of a run that fails: what it has done
        if results.runs:
            report.write(args.out, evaluation.in_order(lengths), runner.FULL)
    print((args.out / "table.md").read_text())


def _examples(chosen: list[str], tokens: int, args: argparse.Namespace, tokenizer: Any) -> Iterator[Any]:
    from vllm_kvplug.eval import tasks

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for task in chosen:
        for index in range(args.n):
            yield tasks.make(task, tokens, args.seed, index, count)


def _score(backend: Any, policy: str, tokens: int, examples: list[Any], label: str) -> dict[str, Any]:
    answers = backend.answer(policy, examples, label)
    scores = [example.score(text) for example, text in zip(examples, answers.texts, strict=True)]
    about = {"policy": policy, "tokens": tokens, "memory": answers.memory}
    return {**about, "tasks": [e.task for e in examples], "scores": scores, "texts": answers.texts}


def _continue(backend: Any, policy: str, prompts: list[list[int]], label: str) -> list[Continuation]:
    return backend.continue_text(policy, prompts, DECODED, label)


@dataclass
class _Evaluation:
    """Runs of policies; those that are in the results already are left out. `devices` is what an engine has of them."""

    workers: spread.Spread
    devices: int
    backend: Any
    policies: list[str]
    results: report.Results

    def score(self, examples: dict[int, list[Any]]) -> None:
        """Score every policy on the examples of every length in tokens."""
        keys = {report.key_of(policy, n): (policy, n) for n in examples for policy in self.policies}
        jobs = [
            (self.backend, policy, tokens, examples[tokens], key)
            for key, (policy, tokens) in keys.items()
            if key not in self.results.runs
        ]
        for number, run in self.workers.each(_score, jobs, self.devices):
            self.results.add(jobs[number][-1], run)

    def compare(self, file: Path, lengths: list[int], tokenizer: Any) -> None:
        """Compare every policy with full attention, whose continuations are kept beside the results."""
        from vllm_kvplug.eval.runner import FULL

        kind, ids = f"fidelity {file.name}", tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]
        pieces = {tokens: fidelity.prompts(ids, tokens, 16) for tokens in lengths}
        short = [tokens for tokens in lengths if not pieces[tokens]]
        if short:
            raise PolicyError(f"--fidelity {file} has fewer than {min(short)} tokens: give a longer text")
        pairs = [(policy, tokens) for tokens in lengths for policy in self.policies if policy != FULL]
        missing = {key: pair for pair in pairs if (key := report.key_of(*pair, kind)) not in self.results.runs}
        full = {report.key_of(FULL, tokens, kind): (FULL, tokens) for _, tokens in missing.values()}
        for key, found in self._continue({k: pair for k, pair in full.items() if k not in self.results.runs}, pieces):
            self.results.add(key, {"continuations": [[c.tokens, c.steps] for c in found]})
        for key, found in self._continue(missing, pieces):
            policy, tokens = missing[key]
            saved = self.results.runs[report.key_of(FULL, tokens, kind)]["continuations"]
            theirs = [Continuation(ids, [{int(t): p for t, p in s.items()} for s in steps]) for ids, steps in saved]
            self.results.add(key, {"policy": policy, "tokens": tokens, **fidelity.compare(found, theirs)})

    def in_order(self, lengths: list[int]) -> dict[str, Any]:
        """All results, those of earlier commands first: parts that are spread finish in any order."""
        asked: dict[Any, int] = {pair: place for place, pair in enumerate(itertools.product(lengths, self.policies))}

        def place(run: dict[str, Any]) -> int:
            return asked.get((run.get("tokens"), run.get("policy")), -1)

        return dict(sorted(self.results.runs.items(), key=lambda item: place(item[1])))

    def _continue(self, runs: dict[str, tuple[str, int]], pieces: dict[int, Any]) -> Iterator[tuple[str, Any]]:
        keys = list(runs)
        jobs = [(self.backend, policy, pieces[tokens], key) for key, (policy, tokens) in runs.items()]
        for number, found in self.workers.each(_continue, jobs, self.devices):
            yield keys[number], found


def split(text: str) -> list[str]:
    """The parts of a list with commas, of which those within braces belong to JSON."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _length(text: str) -> int:
    if not text.isdigit():
        raise PolicyError(f"--tokens {text}: not a number of tokens")
    return int(text)

"""`kvplug eval`: scores of policies on context-intensive tasks, with intervals, beside the memory they keep."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_kvplug.errors import PolicyError

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
    parser.add_argument("--server", metavar="URL", help="a running server, instead of engines in turn")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    parser.add_argument("--fidelity", type=Path, metavar="FILE", help="also compare distributions on this text")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="results; a rerun goes on with them")


def run(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    from vllm_kvplug.eval import report, runner, tasks

    policies, lengths = split(args.policies), [_length(text) for text in split(args.tokens)]
    chosen = split(args.tasks) if args.tasks else list(tasks.TASKS)
    for policy in policies:  # what is wrong is said before the first engine starts
        if args.server:
            runner.request_options(policy)
        elif policy != runner.FULL:
            runner.read_policy(policy)
    if args.server and args.fidelity:
        raise PolicyError("--fidelity needs engines of this machine: remove --server")
    settings = {"model": args.model, "tasks": chosen, "n": args.n, "seed": args.seed, "server": bool(args.server)}
    results = report.Results(args.out, settings | {"engine": args.engine})
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    backend: Any = runner.Server(args.server, tokenizer) if args.server else runner.Engines(args.model, args.engine)
    for tokens in lengths:
        examples = list(_examples(chosen, tokens, args, tokenizer))
        for policy in policies:
            key = report.key_of(policy, tokens)
            if key not in results.runs:
                results.add(key, _score(backend, policy, tokens, examples, key))
            if args.fidelity:
                _fidelity(backend, results, policy, tokens, args.fidelity, tokenizer)
        report.write(args.out, results.runs, runner.FULL)
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


def _fidelity(backend: Any, results: Any, policy: str, tokens: int, file: Path, tokenizer: Any) -> None:
    """Compare a policy with full attention, whose continuations are kept beside the results."""
    from vllm_kvplug.eval import fidelity, report, runner

    kind = f"fidelity {file.name}"
    key = report.key_of(policy, tokens, kind)
    if policy == runner.FULL or key in results.runs:
        return
    prompts = fidelity.prompts(tokenizer(file.read_text(), add_special_tokens=False)["input_ids"], tokens, 16)
    if not prompts:
        raise PolicyError(f"--fidelity {file} has fewer than {tokens} tokens: give a longer text")
    full_key = report.key_of(runner.FULL, tokens, kind)
    if full_key not in results.runs:
        found = backend.continue_text(runner.FULL, prompts, DECODED, full_key)
        results.add(full_key, {"continuations": [[c.tokens, c.steps] for c in found]})
    full = [
        fidelity.Continuation(ids, [{int(t): p for t, p in step.items()} for step in steps])
        for ids, steps in results.runs[full_key]["continuations"]
    ]
    ours = backend.continue_text(policy, prompts, DECODED, key)
    results.add(key, {"policy": policy, "tokens": tokens, **fidelity.compare(ours, full)})


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

"""How far every policy's next-token distributions are from full attention's on plain text, at two levels of memory.

    python -m benchmarks.fidelity MODEL --out FILE --work DIR [--tokens 1140] [--texts 12] [--levels 0.5 0.25]
        [--policies NAME ...]

Texts are the first tokens of documentation that installed packages carry. Metrics, see vllm_kvplug/eval/fidelity.py:
POLICY@LEVEL.token_match, the share of 64 greedy tokens before the first that differs, and .kld, in nats, a lower bound.
Levels are those of benchmarks/policies_table.py. Policies that cannot serve the model, for lack of a gate or a profile,
are left out, and a row says why. DIR keeps what engines said: the same command goes on where it stopped.

1,140 tokens: the first cut of `rkv` comes at 1,152, so that most of the decoded tokens follow it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gate_texts import documents
from benchmarks.policies_table import compared, runs_of
from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval import fidelity
from vllm_kvplug.eval.fidelity import Continuation
from vllm_kvplug.eval.report import Results
from vllm_kvplug.eval.runner import FULL, Engines
from vllm_kvplug.planning import model_config, model_shape
from vllm_kvplug.policies.registry import make_policy

DECODED = 64


def prompts(tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """The first `tokens` tokens of `count` documents that are long enough, evenly spaced among all."""
    found = [ids for text in documents() if len(ids := tokenizer(text)["input_ids"]) >= tokens]
    return [found[number * len(found) // count][:tokens] for number in range(count)]


def unserved(runs: dict[str, tuple[str, dict[str, Any]]], model: str) -> dict[str, str]:
    """Why runs cannot be made, by their names."""
    shape, reasons = model_shape(model_config(model), model, 1), {}
    for name, (policy, knobs) in runs.items():
        try:
            make_policy(policy, knobs, shape)
        except PolicyError as error:
            reasons[name] = str(error)
    return reasons


def continuations(saved: list[Any]) -> list[Continuation]:
    return [Continuation(tokens, [{int(t): p for t, p in step.items()} for step in steps]) for tokens, steps in saved]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tokens", type=int, default=1140)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--policies", nargs="+", default=compared(), metavar="NAME", help="default: all")
    args = parser.parse_args()
    arguments = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": args.texts, "max_num_batched_tokens": 2048}
    engines = Engines(args.model, arguments)
    asked = prompts(engines.tokenizer, args.tokens, args.texts)
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    results = Results(args.work, {"model": args.model, "texts": digest, "engine": arguments})

    def said(name: str, word: str) -> list[Continuation]:
        """What an engine said, now or in an earlier call."""
        if name not in results.runs:
            found = engines.continue_text(word, asked, DECODED, name)
            results.add(name, {"continuations": [[c.tokens, c.steps] for c in found], "commit": report.COMMIT})
        return continuations(results.runs[name]["continuations"])

    runs = runs_of(args.policies, args.levels, args.tokens, args.model)
    reasons = unserved(runs, args.model)
    metrics: dict[str, float] = {"fidelity.texts": args.texts, "fidelity.tokens": args.tokens}
    rows: list[dict[str, Any]] = [{"run": name, "left_out": reason} for name, reason in reasons.items()]
    full = said(FULL, FULL)
    for name, (policy, knobs) in runs.items():
        if name in reasons:
            continue
        found = fidelity.compare(said(name, f"{policy}:{json.dumps(knobs)}"), full)
        metrics |= {f"{name}.token_match": found["token_match"], f"{name}.kld": found["kl"]}
        rows.append({"run": name, "policy": policy, "knobs": knobs, **found, "commit": results.runs[name]["commit"]})
        print(name, found, flush=True)
        report.write(args.out, report.result("fidelity", metrics, [*rows, {"texts_sha256": digest}]))


if __name__ == "__main__":
    main()

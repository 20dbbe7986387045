"""First runs on a GPU: stock vLLM's tokens under a policy that keeps everything, and eager = captured graphs.

    python -m benchmarks.gpu_smoke MODEL --tasks tasks.py --out FILE [--gated]

Two sets of prompts. `tasks`: answers the model is sure of, where a differing token is an error. `open text`:
continuations of source code, where two bf16 logits often tie exactly, so that any two attention kernels part
somewhere; stock vLLM against itself (graphs against eager mode) is the control, and each row gives stock's margin
at the first token that differs. In float32 both sets must agree. --gated runs the policies that score every token
when it comes in, with gates of random weights, instead of the others.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engine import SHARED_GPU, engine
from benchmarks.eval_tasks import examples, load_tasks
from benchmarks.parity import GRAPHS, prompts
from vllm_kvplug.tiny import random_gate

COMMON: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 512, **SHARED_GPU}
MODES = {"eager": {"enforce_eager": True}, "graph": {"compilation_config": GRAPHS}}
WHOLE = [("streaming", {"window": 4096}), ("snapkv", {"ratio": 1.0})]
COMPRESSED = [("heterocache", {"rho": 0.5}), ("heterocache", {"rho": 0.5, "tau_drift": 1.0, "land_after": 4})]
GATED_WHOLE = [("knorm", {"ratio": 1.0}), ("wgkv", {"tau": 0.0, "window": 64})]
GATED_COMPRESSED = [
    ("knorm", {"ratio": 0.5, "cut_every": 256}),
    ("fastkvzip", {"ratio": 0.5, "cut_every": 256, "window": 64, "decode_budget": 256}),
    ("fastkvzip+yakv", {"ratio": 0.2, "offload": 0.4, "cut_every": 256, "window": 64}),
    ("wgkv", {"tau": 0.5, "window": 64, "cap": 0.4, "cut_every": 256}),
    ("wgkv", {"tau": 0.5, "window": 64, "defer": True}),
    ("wgkv+snapkv", {"tau": 0.5, "window": 64, "budget": 64, "cut_every": 256}),
    ("wgkv+quest", {"tau": 0.5, "window": 64, "budget_tokens": 128}),
    ("wgkv+yakv", {"tau": 0.5, "window": 64, "cut_every": 256}),
]
PromptSets = dict[str, list[tuple[list[int], int]]]
"""Prompts and bounds on their answers, by the name of the set."""
Generated = dict[str, list[tuple[list[int], list[float]]]]


def prompt_sets(model: str, tasks: Path) -> PromptSets:
    from transformers import AutoTokenizer

    made = examples(load_tasks(tasks), AutoTokenizer.from_pretrained(model), model, 1024, 3, 7)
    return {
        "tasks": [(e["ids"], e["max_tokens"]) for e in made],
        "open text": [(ids, 32) for ids in prompts(model)],
    }


def generate(llm: Any, sets: PromptSets) -> Generated:
    """For each prompt the greedy tokens, and at each token the margin between the two best log-probabilities."""
    from vllm import SamplingParams

    asked = [item for items in sets.values() for item in items]
    params = [SamplingParams(temperature=0, max_tokens=n, detokenize=False, logprobs=2) for _, n in asked]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in asked], params, use_tqdm=False)
    found = iter(o.outputs[0] for o in outputs)
    return {name: [(list(o.token_ids), _margins(o)) for o in islice(found, len(items))] for name, items in sets.items()}


def with_gate(model: str, policy: str, knobs: dict[str, Any]) -> dict[str, Any]:
    kind = policy.partition("+")[0]
    if kind not in ("wgkv", "fastkvzip"):
        return knobs
    path = Path(tempfile.gettempdir()) / f"random-{kind}.safetensors"
    return {**knobs, "gate": str(random_gate(Path(model), path, kind))}


def _margins(output: Any) -> list[float]:
    best = [sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in output.logprobs]
    return [round(pair[0] - pair[1], 4) for pair in best]


def compare(mine: Generated, theirs: Generated) -> dict[str, Any]:
    """Differing tokens of each prompt set, and the other's margin at each prompt's first difference."""
    row: dict[str, Any] = {}
    for name, pairs in mine.items():
        wrong, margins = 0, []
        for (tokens, _), (other, gaps) in zip(pairs, theirs[name], strict=True):
            first = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), None)  # noqa: B905
            if first is None and len(tokens) == len(other):
                continue
            first = min(len(tokens), len(other)) if first is None else first
            wrong += max(len(tokens), len(other)) - first - sum(a == b for a, b in zip(tokens[first:], other[first:]))  # noqa: B905
            margins.append(gaps[min(first, len(gaps) - 1)])
        row |= {f"{name}: mismatched tokens": wrong, f"{name}: margins": margins}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gated", action="store_true")
    args = parser.parse_args()
    sets = prompt_sets(args.model, args.tasks)
    rows: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    first: dict[str, Generated] = {}
    whole, compressed = (GATED_WHOLE, GATED_COMPRESSED) if args.gated else (WHOLE, COMPRESSED)
    for dtype, cases in (("float32", whole[:1]), ("bfloat16", whole + compressed)):
        for mode, arguments in MODES.items():
            for policy, knobs in [(None, None), *cases]:
                name = f"{policy} {knobs}" if policy else "stock"
                row: dict[str, Any] = {"dtype": dtype, "mode": mode, "case": name}
                chosen = (
                    {"kv_policy": policy, "kv_policy_config": with_gate(args.model, policy, knobs)} if policy else {}
                )
                try:
                    with engine(args.model, dtype=dtype, **COMMON, **arguments, **chosen) as llm:
                        tokens = generate(llm, sets)
                except Exception:  # one broken case must not hide the results of the others
                    row["error"] = traceback.format_exc()[-300:]
                    rows.append(row)
                    print(row, flush=True)
                    continue
                first.setdefault(f"{dtype} {name}", tokens)
                if mode == "graph":
                    row["against eager"] = compare(tokens, first[f"{dtype} {name}"])
                if policy is None:
                    stock = tokens
                elif (policy, knobs) in whole:
                    row["against stock"] = compare(tokens, stock)
                rows.append(row)
                print(row, flush=True)
                _count(metrics, row, policy, dtype, mode)
                report.write(args.out, report.result("gpu_smoke", metrics, rows))
        metrics[f"gpu_smoke.tokens_{dtype}"] = sum(len(t) for items in stock.values() for t, _ in items)
    print(metrics)
    report.write(args.out, report.result("gpu_smoke", metrics, rows))


def _count(metrics: dict[str, float], row: dict[str, Any], policy: str | None, dtype: str, mode: str) -> None:
    """The headline numbers: streaming against stock on the tasks; everything else under longer names."""
    against = row.get("against stock")
    if against and policy in ("streaming", "wgkv"):
        name = "gpu_smoke" if policy == "streaming" else "gpu_smoke.gated"
        short = f"{name}.{mode}_mismatched_tokens" if dtype == "bfloat16" else f"{name}.{mode}_float32_mismatched"
        metrics[short] = against["tasks: mismatched tokens"]
        metrics[f"{short}_open_text"] = against["open text: mismatched tokens"]
    if policy is None and mode == "graph":
        metrics[f"gpu_smoke.stock_graph_against_eager_{dtype}"] = sum(
            v for k, v in row["against eager"].items() if k.endswith("tokens")
        )


if __name__ == "__main__":
    main()

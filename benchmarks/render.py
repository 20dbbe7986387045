"""Writes the results section of README.md from the files in benchmarks/results/. What was not measured is left out.

python -m benchmarks.render [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS

SOURCES = (
    "Every figure is from a file in [benchmarks/results](benchmarks/results), which names command, commit, versions and "
    "machine. Our SnapKV and Expected Attention keep the tokens that those of kvpress 0.5.5 keep "
    "([against_kvpress.json](benchmarks/results/against_kvpress.json))."
)
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- results: python -m benchmarks.render -->", "<!-- end of results -->"
RUNS = {
    "heterocache_rho50": "heterocache, rho 0.5, with retrieval",
    "heterocache_rho50_no_retrieval": "heterocache, rho 0.5, without",
    "streaming_512": "streaming, 4 + 508 tokens",
    "snapkv_50": "snapkv, half",
    "random_50": "random, half",
}
TASKS = ("text2json", "multineedle", "html2tsv", "kv", "vartrack", "manyshot_icl", "latefact")


Metrics = dict[str, float]


def load(name: str) -> tuple[Metrics, list[dict[str, Any]]]:
    """Metrics and rows of a result file; nothing of one that is not there."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}, []
    content = json.loads(path.read_text())
    return content["metrics"], content["rows"]


def section() -> str:
    """The text between the two markers."""
    metrics, parts = load("first_light")
    lifecycle, gates = load("heterocache")[0], load("fastkvzip")[0]
    lines = ["## Results", "", *task_table(metrics, parts)]
    notes = [gate_note(gates), memory_note(metrics), exactness_note(metrics), soak_note(lifecycle)]
    notes.append(gpu_note(metrics, parts))
    lines += [note for note in notes if note]
    return "\n".join([BEGIN, "", *lines, "", SOURCES, "", END])


def task_table(m: Metrics, parts: list[dict[str, Any]]) -> list[str]:
    rows = {row["run"]: row for part in parts if part["name"].startswith("eval1024") for row in part["rows"]}
    if "full" not in rows:
        return []
    count = m["eval1024.examples"] / len(TASKS)
    lines = [
        f"SmolLM2-135M trained for these tasks, about {rows['full']['prompt_tokens']:.0f} prompt tokens, {count:.0f} "
        "examples a task, question in the prompt; mean scores, and the share of full attention's (95% interval). The "
        "tasks are context-intensive: hard on eviction on purpose.",
        "",
        "| kept | " + " | ".join(TASKS) + " | of full |",
        "|---" * (len(TASKS) + 2) + "|",
        "| everything | " + " | ".join(f"{rows['full'][t]:.2f}" for t in TASKS) + " | 1 |",
    ]
    for run, name in RUNS.items():
        if run in rows:
            scores = " | ".join(f"{rows[run][t]:.2f}" for t in TASKS)
            key = f"eval1024.{run}.rel"
            lines.append(f"| {name} | {scores} | {m[key]:.2f} ({m[key + '_low']:.2f} to {m[key + '_high']:.2f}) |")
    return [*lines, ""]


def gate_note(m: Metrics) -> str:
    if "eval4096.keep40.rel" not in m:
        return ""
    low, high = m["eval4096.keep40.rel_low"], m["eval4096.keep40.rel_high"]
    smaller = "".join(
        f"; {percent}%: {m[f'{key}.rel']:.3f} ({m[f'{key}.rel_low']:.3f} to {m[f'{key}.rel_high']:.3f})"
        for percent in (30, 20)
        if f"{(key := f'eval4096.keep{percent}')}.rel" in m
    )
    return (
        f"- **A trained gate.** The same tasks at 4,096 tokens, {m['eval4096.examples'] / len(TASKS):.0f} examples each: "
        f"`fastkvzip` keeps 40% of the prompt and "
        f"{m['eval4096.keep40.rel']:.3f} ({low:.3f} to {high:.3f}) of full attention's score with the gate that comes "
        f"with the project (measured before that was put into 8 bits){smaller}. On held-out tokens the gate "
        f"ranks like its target with a correlation of {m['gate.rank_correlation']:.2f}, and finds "
        f"{m['gate.recall30']:.0%} of the target's top 30%."
    )


def memory_note(m: Metrics) -> str:
    held = {k.rsplit(".", 1)[1]: v for k, v in m.items() if k.startswith("bytes.heterocache_rho50")}
    if not held:
        return ""
    return (
        f"- **Memory.** After a 1,500-token prompt, heterocache at rho 0.5 holds {held['after_shrink_ratio']:.1%} of stock "
        f"vLLM's KV bytes ({held['after_shrink_ratio_with_tables']:.1%} with its tables); "
        f"{held['pages_in_foreign_layers']:.0%} of its pages lie in another layer's part of a block. In a pool where stock "
        f"decodes {m['bytes.stock.decoding_together']:.0f} such prompt at a time, it decodes "
        f"{held['decoding_together']:.0f}."
    )


def exactness_note(m: Metrics) -> str:
    if "parity.tokens" not in m:
        return ""
    return (
        "- **Exactness.** With budgets that hold the whole context, "
        f"{m['parity.mismatched_tokens']:.0f} of {m['parity.tokens']:,.0f} greedy tokens differ from stock vLLM's (CPU, "
        "float32, four policies, chunked and not, alone and together, "
        f"{m['parity.preemptions']:.0f} preemptions in a tiny pool)."
    )


def soak_note(m: Metrics) -> str:
    if "soak.requests" not in m:
        return ""
    return (
        f"- **Under pressure.** {m['soak.requests']:.0f} random requests under heterocache with retrieval, in a pool and a "
        f"host tier that are too small: {m['soak.preemptions']:.0f} preemptions, {m['soak.triggers']:.0f} triggers; "
        f"{m['soak.mismatched_requests']:.0f} requests whose tokens are not those of their runs alone, "
        f"{m['soak.freed_page_writes']:.0f} writes to freed pages, {m['soak.leaked_blocks']:.0f} blocks and "
        f"{m['soak.leaked_host_slots']:.0f} host slots left behind."
    )


def gpu_note(m: Metrics, parts: list[dict[str, Any]]) -> str:
    part = next((p for p in parts if p["name"] == "gpu_smoke"), None)
    if part is None:
        return ""
    streaming = [r["against stock"] for r in part["rows"] if "streaming" in r["case"] and "against stock" in r]
    margins = [margin for row in streaming for name in ("tasks", "open text") for margin in row[f"{name}: margins"]]
    of_tasks = max((margin for row in streaming for margin in row["tasks: margins"]), default=0.0)
    smoke = {k.split(".", 1)[1]: v for k, v in m.items() if k.startswith("gpu_smoke")}
    return (
        "- **GPU (H200).** Under `streaming` with a window that holds everything, bfloat16, of "
        f"{smoke['tokens_bfloat16']:,.0f} greedy tokens {smoke['eager_mismatched_tokens']:.0f} of answers to the tasks and "
        f"{smoke['eager_mismatched_tokens_open_text']:.0f} of open text differ from stock vLLM's in eager mode, "
        f"{smoke['graph_mismatched_tokens']:.0f} and {smoke['graph_mismatched_tokens_open_text']:.0f} with captured decode "
        f"graphs: they part where stock's own two best log-probabilities are {of_tasks:g} (tasks) and at most "
        f"{max(margins, default=0.0):g} (open text) apart. In float32 with graphs "
        f"{smoke['graph_float32_mismatched']:.0f} and {smoke['graph_float32_mismatched_open_text']:.0f} differ. Captured "
        "graphs give the tokens of eager mode under every policy that was compared."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if README.md is not up to date")
    args = parser.parse_args()
    text = README.read_text()
    head, rest = text.split(BEGIN)
    new = head + section() + rest.split(END)[1]
    if args.check:
        sys.exit("README.md is not rendered from the results" if new != text else 0)
    README.write_text(new)


if __name__ == "__main__":
    main()

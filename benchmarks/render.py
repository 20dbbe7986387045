"""Writes the results table of README.md from benchmarks/results/first_light.json.

python -m benchmarks.render [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.report import RESULTS

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


def table() -> str:
    """The section between the two markers."""
    result = json.loads((RESULTS / "first_light.json").read_text())
    m, parts = result["metrics"], result["rows"]
    tasks = next(p for p in parts if p["name"].startswith("eval1024"))
    rows = {row["run"]: row for row in tasks["rows"]}
    count = m["eval1024.examples"] / len(TASKS)
    lines = [
        "## Results",
        "",
        f"SmolLM2-135M trained for these tasks, about {rows['full']['prompt_tokens']:.0f} prompt tokens, {count:.0f} "
        "examples a task, question in the prompt; mean scores, and the share of full attention's (95% interval). The "
        "tasks are context-intensive: hard on eviction on purpose.",
        "",
        "| kept | " + " | ".join(TASKS) + " | of full |",
        "|---" * (len(TASKS) + 2) + "|",
        "| everything | " + " | ".join(f"{rows['full'][t]:.2f}" for t in TASKS) + " | 1 |",
    ]
    for run, name in RUNS.items():
        scores = " | ".join(f"{rows[run][t]:.2f}" for t in TASKS)
        key = f"eval1024.{run}.rel"
        lines.append(f"| {name} | {scores} | {m[key]:.2f} ({m[key + '_low']:.2f} to {m[key + '_high']:.2f}) |")
    return "\n".join([BEGIN, "", *lines, "", *notes(m), "", END])


def notes(m: dict[str, float]) -> list[str]:
    """Memory, exactness and GPU figures, a bullet each."""
    held = {k.rsplit(".", 1)[1]: v for k, v in m.items() if k.startswith("bytes.heterocache_rho50")}
    return [
        f"- **Memory.** After a 1,500-token prompt, heterocache at rho 0.5 holds {held['after_shrink_ratio']:.1%} of stock "
        f"vLLM's KV bytes ({held['after_shrink_ratio_with_tables']:.1%} with its tables); "
        f"{held['pages_in_foreign_layers']:.0%} of its pages lie in another layer's part of a block. In a pool where stock "
        f"decodes {m['bytes.stock.decoding_together']:.0f} such prompt at a time, it decodes "
        f"{held['decoding_together']:.0f}.",
        "- **Exactness.** With budgets that hold the whole context, "
        f"{m['parity.mismatched_tokens']:.0f} of {m['parity.tokens']:,.0f} greedy tokens differ from stock vLLM's (CPU, "
        "float32, four policies, chunked and not, alone and together, "
        f"{m['parity.preemptions']:.0f} preemptions in a tiny pool).",
        gpu_note({k.split(".", 1)[1]: v for k, v in m.items() if k.startswith("gpu_smoke")}),
        "",
        "From [first_light.json](benchmarks/results/first_light.json), which names command, commit, versions and machine of "
        "each part. Our SnapKV ranks tokens exactly as kvpress 0.5.5 does "
        "([against_kvpress.json](benchmarks/results/against_kvpress.json)).",
    ]


def gpu_note(smoke: dict[str, float]) -> str:
    if not smoke:
        return (
            "- **GPU.** Not measured yet: every figure here is from a CPU. `python -m benchmarks.gpu_smoke` compares tokens "
            "with stock vLLM's on a GPU."
        )
    return (
        "- **GPU (H200).** Stock's tokens on the tasks in bfloat16: "
        f"{smoke['eager_mismatched_tokens']:.0f} differ in eager mode, {smoke['graph_mismatched_tokens']:.0f} with captured "
        f"decode graphs; in float32 {smoke['eager_float32_mismatched_open_text']:.0f} and "
        f"{smoke['graph_float32_mismatched_open_text']:.0f} on open text too. In bfloat16 open text parts where stock's two "
        "best logits tie within rounding."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if README.md is not up to date")
    args = parser.parse_args()
    text = README.read_text()
    head, rest = text.split(BEGIN)
    new = head + table() + rest.split(END)[1]
    if args.check:
        sys.exit("README.md is not rendered from the results" if new != text else 0)
    README.write_text(new)


if __name__ == "__main__":
    main()

"""Writes the results in README.md and docs from the files in benchmarks/results/. What was not measured is left out.

python -m benchmarks.render [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.policies_table import compared
from benchmarks.report import RESULTS

SOURCES = (
    "Every figure is from a file in [benchmarks/results](benchmarks/results), which names command, commit, versions and "
    "machine. Our SnapKV and Expected Attention keep the tokens that those of kvpress 0.5.5 keep "
    "([against_kvpress.json](benchmarks/results/against_kvpress.json))."
)
ROOT = Path(__file__).parent.parent
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
    content = load_file(name)
    return content["metrics"], content["rows"]


def load_file(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {"metrics": {}, "rows": [], "machine": ""}


def section() -> str:
    """README's text between the two markers."""
    metrics, parts = load("first_light")
    lifecycle, gates = load("heterocache")[0], load("fastkvzip")[0]
    lines = ["## Results", "", *policy_table(load_file("policies")), *task_table(metrics, parts)]
    admitted, speed = load("wgkv")[0], load("gpu_engine")[0]
    notes = [parts_note(lifecycle), gate_note(gates), admission_note(admitted), memory_note(metrics)]
    notes += [exactness_note(metrics), soak_note(lifecycle), gpu_note(metrics, parts)]
    lines += [note for note in notes if note]
    lines += speed_table(speed)
    return "\n".join([*lines, "", SOURCES])


def policy_table(result: dict[str, Any]) -> list[str]:
    """Every policy at every level, the best of a level first, from a file of benchmarks.policies_table."""
    m: Metrics = result["metrics"]
    lengths = sorted({int(key.rsplit(".eval", 1)[1].split(".")[0]) for key in m if "@" in key})
    runs = {key.rsplit(".eval", 1)[0] for key in m if "@" in key and key.endswith(".rel")}
    if not runs:
        return []
    examples = m[f"eval{lengths[0]}.examples"]
    by_all = [n for n in lengths if all(f"{run}.eval{n}.rel" in m for run in runs)]
    held = (by_all or lengths)[-1]
    timed = f"full.eval{held}.tpot_ms" in m

    def place(run: str) -> tuple[float, float]:
        """Larger levels first, then higher scores at the shortest length that was measured."""
        rel = next(m[key] for n in lengths if (key := f"{run}.eval{n}.rel") in m)
        return -float(run.rsplit("@", 1)[1]), -rel

    head = ["told to keep", "policy", *(f"of full's score, {n:,} tokens" for n in lengths)]
    head += ["GPU KV bytes, of full's", "host MiB a request", *(["ms a token"] if timed else [])]
    lines = [
        f"Every policy that serves the small model, at the same levels: scores of {examples:.0f} examples relative to full "
        f"attention's (95% interval), and what requests of {held:,} tokens really take while they decode"
        + (f", full attention {m[f'full.eval{held}.tpot_ms']:.1f} ms a token" if timed else "")
        + f" ({result['machine']}).",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for run in sorted(runs, key=place):
        policy, level = run.rsplit("@", 1)
        cells = [f"{float(level):.0%}", f"`{policy}`", *(_relative(m, f"{run}.eval{n}") for n in lengths)]
        key = f"{run}.eval{held}"
        cells += [_cell(m, f"{key}.gpu_kv_ratio", ".2f"), _cell(m, f"{key}.host_bytes", ".1f", 1 / 2**20)]
        lines.append(f"| {' | '.join(cells + ([_cell(m, f'{key}.tpot_ms', '.1f')] if timed else []))} |")
    failed = [f"`{row['run']}`" for row in result["rows"] if "error" in row]
    measured = {run.rsplit("@", 1)[0] for run in runs}
    missing = [f"`{name}`" for name in compared() if name not in measured]
    notes = [f"Did not run: {', '.join(failed)}."] if failed else []
    notes += [f"Not measured yet: {', '.join(missing)}, and where there is a dash."] if missing else []
    return [*lines, "", *([" ".join(notes), ""] if notes else [])]


def _relative(m: Metrics, key: str) -> str:
    if f"{key}.rel" not in m:
        return "-"
    return f"{m[f'{key}.rel']:.2f} ({m[f'{key}.rel_low']:.2f} to {m[f'{key}.rel_high']:.2f})"


def _precisely(m: Metrics, key: str) -> str:
    return f"{m[f'{key}.rel']:.3f} ({m[f'{key}.rel_low']:.3f} to {m[f'{key}.rel_high']:.3f})"


def _cell(m: Metrics, key: str, form: str, unit: float = 1.0) -> str:
    return format(m[key] * unit, form) if key in m else "-"


def fidelity_table(result: dict[str, Any]) -> list[str]:
    """The policies nearest to full attention first, from the file of benchmarks.fidelity."""
    m: Metrics = result["metrics"]
    runs = [key.removesuffix(".kld") for key in m if key.endswith(".kld")]
    if not runs:
        return []
    left_out = dict.fromkeys(row["run"].rsplit("@", 1)[0] for row in result["rows"] if "left_out" in row)
    lines = [
        f"SmolLM2-135M-Instruct on {m['fidelity.texts']:.0f} pieces of documentation of {m['fidelity.tokens']:,.0f} tokens, "
        "64 greedy tokens each ([fidelity.json](../benchmarks/results/fidelity.json)). A small model's greedy tokens part from "
        "each other soon; `rkv` has the whole prompt until its first cut, 12 tokens into the answer.",
        "",
        "| told to keep | policy | greedy tokens matched | KL in nats, at least |",
        "|---|---|---|---|",
    ]
    for run in sorted(runs, key=lambda run: (-float(run.rsplit("@", 1)[1]), -m[f"{run}.token_match"])):
        policy, level = run.rsplit("@", 1)
        lines.append(f"| {float(level):.0%} | `{policy}` | {m[f'{run}.token_match']:.2f} | {m[f'{run}.kld']:.4f} |")
    names = ", ".join(f"`{name}`" for name in left_out)
    return [*lines, *(["", f"Left out, since this model has no gate or profile for them: {names}."] if names else [])]


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


def parts_note(m: Metrics) -> str:
    if "ablation2048.whole_rho40.rel" not in m:
        return ""
    whole, half = "ablation2048", "_rho40"
    return (
        f"- **HeteroCache's parts.** The same tasks at 2,048 tokens, {m[f'{whole}.examples'] / len(TASKS):.0f} examples "
        f"each: {_precisely(m, f'{whole}.whole')} of full attention's score at rho 0.5, "
        f"{_precisely(m, f'{whole}.no_retrieval')} without retrieval, {_precisely(m, f'{whole}.no_allocation')} with even "
        f"budgets; at rho 0.4 {_precisely(m, f'{whole}.whole{half}')}, {_precisely(m, f'{whole}.no_retrieval{half}')} and "
        f"{_precisely(m, f'{whole}.no_allocation{half}')}. Which heads are kept whole does most "
        '([architecture](docs/architecture.md), "Head profiles").'
    )


def admission_note(m: Metrics) -> str:
    if "eval4096.tau10.rel" not in m:
        return ""
    replay = (f"{m[f'replay.{way}_mse']:.4f}" for way in ("own", "replayed", "random_but_first"))
    return (
        f"- **A gate on admission.** At 4,096 tokens, {m['eval4096.examples'] / len(TASKS):.0f} examples each, `wgkv` admits "
        f"{m['eval4096.tau10.admitted']:.0%} of the tokens that leave its window with the gate that comes with the project "
        f"and its threshold, and has {_precisely(m, 'eval4096.tau10')} of full attention's score; with a threshold of 0.35 "
        f"it admits {m['eval4096.tau35.admitted']:.0%}, and has {_precisely(m, 'eval4096.tau35')}. With 30% of the tokens "
        f"`snapkv` has {_precisely(m, 'eval4096.snapkv_30')}, `streaming` {_precisely(m, 'eval4096.streaming_30')} and "
        f"`random` {_precisely(m, 'eval4096.random_30')}. The last hidden states' mean squared distance from full attention's "
        "is {} behind the gate's own choice, {} behind its choice for another text, and {} behind as many random "
        f"tokens and the first 4. Attention of a prompt of 131,072 tokens in chunks of 16,384, a fifth of "
        f"it admitted, takes {m['sparse_prefill.16384.sparse_s']:.1f} s in place of "
        f"{m['sparse_prefill.16384.dense_s']:.1f} s (one layer of Llama-3.1-8B times 32, H200), the gate "
        f"{m['sparse_prefill.16384.gate_s']:.2f} s."
    ).format(*replay)


def speed_table(m: Metrics) -> list[str]:
    """Engines on an H200, from a file of benchmarks.gpu_engine."""
    shapes = {"131072x1": "1 x 131,072", "32768x8": "8 x 32,768"}
    if any(f"decode.{shape}.keep20.fp8.tpot_ms" not in m for shape in shapes):
        return []
    lines = [
        "",
        "Speed of whole engines: Llama-3.1-8B's shape with random weights on one H200, captured graphs, a fifth of the prompt "
        "kept (policy `synthetic`: some heads whole, the others unevenly). Prompts are dense until they shrink.",
        "",
        "| requests x tokens | | stock, bf16 | stock, fp8 | a fifth kept, bf16 | a fifth kept, fp8 |",
        "|---|---|---|---|---|---|",
    ]
    for shape, name in shapes.items():
        keys = [
            f"stock.{shape}.bf16",
            f"stock.{shape}.fp8",
            f"decode.{shape}.keep20.bf16",
            f"decode.{shape}.keep20.fp8",
        ]
        for what, metric in (("ms per output token", "tpot_ms"), ("seconds for all prompts", "prefill_s")):
            cells = " | ".join(f"{m[f'{key}.{metric}']:.2f}" for key in keys)
            lines.append(f"| {name} | {what} | {cells} |")
    lines += [
        "",
        "With `heterocache` at rho 0.5, `land_after` 36 and every satellite fetching anew from the host every 40 tokens, the median time "
        f"between tokens at 131,072 tokens is {m['tail.131072.median_ms']:.1f} ms, and the 99th percentile "
        f"{m['tail.131072.p99_over_median']:.2f} times that.",
    ]
    return lines


def gate_note(m: Metrics) -> str:
    if "eval4096.keep40.rel" not in m:
        return ""
    smaller = ", ".join(f"{_precisely(m, f'eval4096.keep{percent}')} with {percent}%" for percent in (30, 20))
    unseen = ", ".join(f"{_precisely(m, f'multiquery4096.keep{percent}')} with {percent}%" for percent in (40, 20))
    return (
        f"- **A trained gate.** The same tasks at 4,096 tokens, {m['eval4096.examples'] / len(TASKS):.0f} examples each: "
        f"`fastkvzip` has {_precisely(m, 'eval4096.keep40')} of full attention's score with 40% of the prompt and the gate "
        f"that comes with the project, {smaller}; where the context is cut before any question is seen {unseen} (`snapkv` "
        f"{_precisely(m, 'multiquery4096.snapkv_40')} with 40%). On held-out tokens the gate ranks like its target with a "
        f"correlation of {m['gate.rank_correlation']:.2f}, and finds {m['gate.recall30']:.0%} of the target's top 30%."
    )


GATED = {"eval4096": "Questions are in the prompt", "multiquery4096": "Contexts are cut before questions are seen"}


def gate_table(content: dict[str, Any]) -> list[str]:
    """Runs of benchmarks.gate_sweep, policy by policy, those that store most first."""
    m, lines = content["metrics"], list[str]()
    for key, title in GATED.items():
        rows = [row for row in content["rows"] if row["key"] == key and f"{key}.{row['run']}.rel" in m]
        if not rows:
            continue
        policies = list(dict.fromkeys(row["policy"] for row in rows))
        rows.sort(key=lambda row: (policies.index(row["policy"]), "gate" in row["knobs"], -row["stored_ratio"]))
        lines += [
            *([""] if lines else []),
            f"{title}, {m[f'{key}.examples'] / len(TASKS):.0f} examples a task. *Admitted*: of the tokens that have left the "
            "window. *Stored*: tokens that a head has, of all, while requests decode.",
            "",
            "| policy | knobs | admitted | stored | of full's score |",
            "|---|---|---|---|---|",
        ]
        lines += [_gate_row(m, row) for row in rows]
    return lines


def _gate_row(m: Metrics, row: dict[str, Any]) -> str:
    run, knobs = f"{row['key']}.{row['run']}", {k: v for k, v in row["knobs"].items() if k != "scores"}
    if gate := knobs.pop("gate", None):
        knobs["gate"] = Path(gate).stem
    admitted = f"{m[f'{run}.admitted']:.0%}" if f"{run}.admitted" in m else ""
    told = ", ".join(f"{name} {value}" for name, value in knobs.items())
    return f"| `{row['policy']}` | {told} | {admitted} | {m[f'{run}.stored_ratio']:.0%} | {_precisely(m, run)} |"


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


def written(path: Path, lines: str) -> str:
    """The text of a file with `lines` between its markers."""
    head, rest = path.read_text().split(BEGIN)
    middle = f"\n\n{lines}\n\n" if lines else "\n"
    return f"{head}{BEGIN}{middle}{END}{rest.split(END)[1]}"


def targets() -> dict[Path, str]:
    """Files with markers, and what belongs between them."""
    return {
        ROOT / "README.md": section(),
        ROOT / "docs" / "choosing.md": "\n".join(policy_table(load_file("policies"))).rstrip(),
        ROOT / "docs" / "evaluation.md": "\n".join(fidelity_table(load_file("fidelity"))),
        ROOT / "docs" / "gates.md": "\n".join(gate_table(load_file("gates4096"))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a file is not up to date")
    args = parser.parse_args()
    for path, lines in targets().items():
        new = written(path, lines)
        if not args.check:
            path.write_text(new)
        elif new != path.read_text():
            sys.exit(f"{path.relative_to(ROOT)} is not rendered from the results")


if __name__ == "__main__":
    main()

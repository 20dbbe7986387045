"""Results on disk: JSON after every run, then a table as CSV and Markdown, and a plot."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.eval.scoring import interval, relative

Row = dict[str, Any]
MEAN = "mean"


class Results:
    """Finished runs in DIR/results.json. A rerun with the same settings goes on where the last one stopped.

    A run has `tasks` and `scores` of every example, and `memory`; fidelity runs have what was measured instead.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.path, self.settings = folder / "results.json", settings
        self.runs: dict[str, Any] = {}
        if self.path.exists():
            found = json.loads(self.path.read_text())
            odd = [k for k, v in settings.items() if found["settings"].get(k) != v]
            if odd:
                raise PolicyError(f"--out {folder} holds results of another {odd[0]}: choose another folder")
            self.runs = found["runs"]

    def add(self, key: str, run: dict[str, Any]) -> None:
        """Keep a run; a stop while it is written leaves the old file."""
        self.runs[key] = run
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps({"settings": self.settings, "runs": self.runs}, indent=1) + "\n")
        fresh.replace(self.path)


def key_of(policy: str, tokens: int, kind: str = "tasks") -> str:
    return f"{policy} {tokens} {kind}"


def rows(runs: dict[str, Any], full: str) -> list[Row]:
    """One row per run and task, and one for the mean: score, relative score with its interval, and kept memory.

    Without a run of full attention at that length, what is relative to it is NaN.
    """
    result = []
    for run in runs.values():
        if "scores" not in run:
            continue
        base = runs.get(key_of(full, run["tokens"]))
        kept = run["memory"] / base["memory"] if base and base["memory"] else math.nan
        for task in [*dict.fromkeys(run["tasks"]), MEAN]:
            chosen = [i for i, name in enumerate(run["tasks"]) if task in (name, MEAN)]
            names, mine = [run["tasks"][i] for i in chosen], [run["scores"][i] for i in chosen]
            row = {"policy": run["policy"], "tokens": run["tokens"], "task": task, "n": len(chosen), "kept": kept}
            row |= {"score": fmean(mine), "relative": math.nan, "low": math.nan, "high": math.nan}
            if base:
                theirs = [base["scores"][i] for i in chosen]
                row["relative"] = relative(names, mine, theirs)
                row["low"], row["high"] = interval(names, mine, theirs)
            result.append(row)
    return result


def write(folder: Path, runs: dict[str, Any], full: str) -> None:
    """Write table.csv, table.md and, where matplotlib is installed, score.png."""
    found = rows(runs, full)
    if found:
        with (folder / "table.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
    (folder / "table.md").write_text(markdown(found, [r for r in runs.values() if "kl" in r]))
    try:
        import matplotlib
    except ImportError:
        print("no score.png: pip install matplotlib")
        return
    matplotlib.use("Agg")
    if found:
        plot(found, folder / "score.png")


def markdown(found: list[Row], fidelity: list[dict[str, Any]]) -> str:
    lines = ["| policy | tokens | task | score | relative | 95% | kept |", "|---|---|---|---|---|---|---|"]
    for r in found:
        cells = [r["policy"], r["tokens"], r["task"], f"{r['score']:.3f}", _number(r["relative"])]
        cells += [f"{_number(r['low'])} to {_number(r['high'])}", _number(r["kept"])]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if fidelity:
        lines += ["", "| policy | tokens | greedy tokens matched | KL, at least | steps |", "|---|---|---|---|---|"]
        for r in fidelity:
            steps = f"{r['kl']:.4f} | {r['compared_steps']}"
            lines.append(f"| {r['policy']} | {r['tokens']} | {r['token_match']:.3f} | {steps} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (kept memory, score) those that no other beats in both, by kept memory; NaN are none."""
    front: list[tuple[float, float]] = []
    for kept, score in sorted((p for p in points if not any(map(math.isnan, p))), key=lambda p: (p[0], -p[1])):
        if not front or score > front[-1][1]:
            front.append((kept, score))
    return front


def plot(found: list[Row], path: Path) -> None:
    """Score relative to full attention against kept memory, one panel per task and one for the mean.

    A line joins those of a length that none of the same length beats in both.
    """
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(r["task"] for r in found))
    across = min(len(tasks), 3)
    down = -(-len(tasks) // across)
    figure, axes = plt.subplots(down, across, figsize=(4 * across, 3 * down), squeeze=False, sharex=True, sharey=True)
    policies = list(dict.fromkeys(r["policy"] for r in found))
    for axis, task in zip(axes.flat, tasks, strict=False):
        axis.set_title(task)
        for r in (r for r in found if r["task"] == task and not math.isnan(r["relative"])):
            error = [[r["relative"] - r["low"]], [r["high"] - r["relative"]]]
            label = r["policy"] if r["tokens"] == found[0]["tokens"] else None
            colour = f"C{policies.index(r['policy']) % 10}"
            axis.errorbar(r["kept"], r["relative"], yerr=error, fmt="o", capsize=3, color=colour, label=label)
            place = {"xy": (r["kept"], r["relative"]), "xytext": (5, 4), "textcoords": "offset points"}
            axis.annotate(f"{r['tokens']}", **place, size=7)
        for tokens in dict.fromkeys(r["tokens"] for r in found):
            front = pareto([(r["kept"], r["relative"]) for r in found if (r["task"], r["tokens"]) == (task, tokens)])
            if front:
                axis.plot(*zip(*front, strict=True), color="0.75", zorder=0)
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    figure.supxlabel("kept memory, relative to full attention")
    figure.supylabel("score, relative to full attention")
    if axes[0][0].has_data():  # nothing is relative to a full run that is not there
        axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)

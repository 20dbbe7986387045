"""What README and docs claim is what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_engine import parity_metrics
from benchmarks.gpu_smoke import compare
from benchmarks.render import fidelity_table, policy_table, written

ROOT = Path(__file__).parents[1]


def test_files_are_rendered_from_the_results():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.render", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


POLICIES = {
    "eval4096.examples": 280,
    "eval8192.examples": 280,
    "full.eval4096.mean": 0.9,
    "full.eval4096.tpot_ms": 1.5,
    "full.eval8192.tpot_ms": 2.0,
    **{f"snapkv@0.5.eval4096.{k}": v for k, v in {"rel": 0.41, "rel_low": 0.36, "rel_high": 0.46}.items()},
    **{f"knorm@0.5.eval4096.{k}": v for k, v in {"rel": 0.72, "rel_low": 0.6, "rel_high": 0.8}.items()},
    **{f"knorm@0.25.eval4096.{k}": v for k, v in {"rel": 0.9, "rel_low": 0.9, "rel_high": 0.9}.items()},
    **{f"knorm@0.5.eval8192.{k}": v for k, v in {"rel": 0.71, "rel_low": 0.6, "rel_high": 0.8}.items()},
    "knorm@0.5.eval4096.gpu_kv_ratio": 0.513,
    "knorm@0.5.eval4096.host_bytes": 3 * 2**19,
    "knorm@0.5.eval4096.tpot_ms": 2.25,
    "knorm@0.5.eval8192.tpot_ms": 3.25,
}


def test_the_table_of_policies():
    """Levels in falling order, within them the best first; what was not measured yet is a dash. Bytes and times are of
    the longest length that all have, which is 4,096 until 8,192 is there for every run.
    """
    rows = [{"run": "rkv@0.5", "error": "no such budget"}]
    lines = policy_table({"metrics": POLICIES, "rows": rows, "machine": "a machine"})
    assert "280 examples" in lines[0] and "4,096 tokens" in lines[0] and "1.5 ms" in lines[0]
    assert [line for line in lines if line.startswith(("| 50%", "| 25%"))] == [
        "| 50% | `knorm` | 0.72 (0.60 to 0.80) | 0.71 (0.60 to 0.80) | 0.51 | 1.5 | 2.2 |",
        "| 50% | `snapkv` | 0.41 (0.36 to 0.46) | - | - | - | - |",
        "| 25% | `knorm` | 0.90 (0.90 to 0.90) | - | - | - | - |",
    ]
    columns = {line.count("|") for line in lines if line.startswith("|")}
    assert columns == {8}
    (notes,) = [line for line in lines if line.startswith("Did not run: `rkv@0.5`. Not measured yet: ")]
    assert "`rkv`" in notes and "`quest`" in notes and "`knorm`" not in notes
    whole = {**POLICIES, "snapkv@0.5.eval8192.rel": 0.4, "knorm@0.25.eval8192.rel": 0.9}
    whole |= {f"{run}.eval8192.rel_{end}": 0.5 for run in ("snapkv@0.5", "knorm@0.25") for end in ("low", "high")}
    assert "8,192 tokens" in policy_table({"metrics": whole, "rows": [], "machine": "a machine"})[0]
    assert policy_table({"metrics": {}, "rows": [], "machine": ""}) == []


def test_the_table_of_fidelity():
    metrics = {"fidelity.texts": 12, "fidelity.tokens": 1140}
    metrics |= {"snapkv@0.5.kld": 0.01, "snapkv@0.5.token_match": 0.4, "duo@0.5.kld": 0.02, "duo@0.5.token_match": 0.6}
    lines = fidelity_table({"metrics": metrics, "rows": [{"run": "wgkv@0.5", "left_out": "no gate"}]})
    assert lines[-1].endswith("`wgkv`.") and lines[-4:-2] == [
        "| 50% | `duo` | 0.60 | 0.0200 |",
        "| 50% | `snapkv` | 0.40 | 0.0100 |",
    ]


def test_parity_counts_tokens_that_differ():
    """From the first that differs on, in float32; an engine that failed is no engine without a difference."""
    stock = {"tasks": [([1, 2, 3, 4], [0.5, 0.25, 2.0, 1.0])], "open text": [([7], [1.0])]}
    mine = {"tasks": [([1, 9, 3, 8], [0.0] * 4)], "open text": [([7], [0.0])]}
    failed = {"dtype": "bfloat16", "error": "why"}
    rows = [{"dtype": "float32", "tokens": 5, **compare(one, stock)} for one in (mine, stock)]
    assert parity_metrics([*rows, failed]) == {
        "parity.engines": 2,
        "parity.tokens": 10,
        "parity.mismatched_tokens": 2,
        "parity.largest_margin": 0.25,
    }
    assert parity_metrics([failed]) == {}


def test_what_stands_between_markers(tmp_path: Path):
    file = tmp_path / "x.md"
    file.write_text("before\n<!-- results: python -m benchmarks.render -->\nold\n<!-- end of results -->\nafter\n")
    file.write_text(written(file, "new"))
    assert "before\n" in file.read_text() and "\n\nnew\n\n" in file.read_text() and "old" not in file.read_text()
    assert written(file, "new") == file.read_text()
    assert written(file, "").count("\n") == 4


def test_result_files_say_where_they_come_from():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert {"name", "command", "commit", "date", "versions", "machine", "metrics"} <= json.loads(
            path.read_text()
        ).keys()

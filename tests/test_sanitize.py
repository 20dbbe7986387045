"""What is read of compute-sanitizer's logs, and that all of our kernels are watched. The tool itself needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sanitize import SELECTIONS, kernel_filter, metrics_of, outcome

ROOT = Path(__file__).parents[1]
HEAD = "========= COMPUTE-SANITIZER\n"
CLEAN = {
    "memcheck": f"{HEAD}========= ERROR SUMMARY: 0 errors\n",
    "racecheck": f"{HEAD}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
}
DIRTY = {
    "memcheck": f"{HEAD}========= ERROR SUMMARY: 3 errors\n",
    "racecheck": f"{HEAD}========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n",
}


@pytest.mark.parametrize("tool", CLEAN)
def test_what_a_log_says(tool: str) -> None:
    clean = outcome(tool, CLEAN[tool], "... 12 passed, 3 skipped, 4 deselected in 9.31s")
    assert clean == {"passed": 12, "failed": 0, "skipped": 3, "errors": 0, "stopped": False}
    dirty = outcome(tool, DIRTY[tool], "!!! KeyboardInterrupt !!!\n1 failed, 2 passed in 45.00s")
    assert (dirty["errors"], dirty["failed"], dirty["passed"], dirty["stopped"]) == (3, 1, 2, True)
    assert dirty["note"].startswith("=========")
    killed = outcome(tool, HEAD, "")
    assert killed["errors"] is None and "note" in killed


def test_no_count_of_errors_while_one_is_missing() -> None:
    rows = [
        {"file": "control", "errors": 5, "passed": 0, "failed": 0},
        {"file": "a", "errors": 1, "passed": 2, "failed": 1},
    ]
    assert metrics_of(rows) == {
        "sanitizer.errors": 1,
        "sanitizer.cases": 3,
        "sanitizer.without_summary": 0,
        "sanitizer.controls_found": 1,
    }
    assert "sanitizer.errors" not in metrics_of([*rows, {"file": "b", "errors": None, "passed": 0, "failed": 0}])


def test_all_kernels_are_watched() -> None:
    watched = kernel_filter()
    for path in (ROOT / "kernels").glob("*.py"):
        lines = path.read_text().splitlines()
        launched = {line.split("[")[0].split()[-1] for line in lines if "_kernel[" in line}
        assert all(f"kns={name}" in watched for name in launched), path
    for path in (ROOT / "csrc" / "cuda").glob("*.cu*"):
        assert "namespace kvplug" in path.read_text(), path
    assert all((ROOT / file).is_file() for file, _ in SELECTIONS)

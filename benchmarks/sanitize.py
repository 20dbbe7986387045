"""Our CUDA ops and kernels under NVIDIA's compute-sanitizer: accesses out of bounds, races in shared memory.

    python -m benchmarks.sanitize --out FILE [--limit 40] [--at-once 16]

Runs parts of the unit tests in processes of their own, side by side, each under one tool and stopped after --limit
seconds. Only kernels of this project are watched, and every tensor is an allocation of its own, so that whatever lies
behind it is out of bounds. `control` makes mistakes on purpose, one in C++ and one in Triton: that memcheck finds them
shows that kernels are watched. One row per tool and selection of tests; `errors` is None where there is no summary.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report

ROOT = Path(__file__).parents[1]
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
CONTROL = ("cuda", "triton")
TOOLS = ("memcheck", "racecheck")
SELECTIONS = [
    ("tests/test_ops.py", "kv_write and cuda and (7-3-64 or 33-2-80 or 19-5-7 or 40-4-128)"),
    ("tests/test_ops.py", "decode_attention and cuda and bfloat16"),
    ("tests/test_ops.py", "decode_attention and cuda and float32"),
    ("tests/test_ops.py", "one_plan and cuda or hopper_plan and (64-8 or 128-4) or hopper_e4m3"),
    ("tests/test_fetch.py", "cuda and (as_many or not_finite or 128-128 or 80-32)"),
    ("tests/test_fetches_kernel.py", "not interpreted"),
    ("tests/test_pivot_scores.py", "not interpreted"),
    ("tests/test_top_tokens_kernel.py", "not interpreted and not largest"),
    ("tests/test_token_selection_kernel.py", "every_row"),
    ("tests/test_page_scores_kernel.py", "not interpreted"),
    ("tests/test_write_gate_kernel.py", "not interpreted"),
    ("tests/placement/test_append_kernel.py", "not interpreted"),
    ("tests/tiers/test_rows.py", "there_and_back and cuda"),
    ("tests/quant/test_higgs.py", "cuda and (1.0-16 or 1.0-80 or 1.0-128 or scores or odd or zero_rows)"),
]
"""Test files, and what pytest's -k leaves of them. Not captured graphs, which need torch's allocator."""

SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}


@dataclass(frozen=True)
class Job:
    """What one process runs under a tool: a part of a test file, or the mistake `select` of `control`."""

    number: int
    tool: str
    file: str
    select: str

    @property
    def command(self) -> list[str]:
        if self.file == "control":
            return [sys.executable, "-m", "benchmarks.sanitize", "--control", self.select]
        return [sys.executable, "-m", "pytest", self.file, "-k", self.select, "-q", "-p", "no:cacheprovider"]


def kernel_filter() -> str:
    """Everything in csrc is in one namespace; a Triton kernel has its function's name."""
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "kernels").glob("*.py")))
    return ",".join(f"kns={name}" for name in ["kvplug", *re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE)])


def run(job: Job, limit: int, folder: Path) -> dict[str, Any]:
    """Row of one process. `timeout` sits between the tool and the tests, so that the tool lives to tell its summary."""
    log = folder / f"{job.number}.log"
    watched = ["--target-processes", "all", "--kernel-name", kernel_filter(), "--check-exit-code", "no"]
    if job.tool == "memcheck":  # torch asks for what a driver may not have
        watched += ["--report-api-errors", "no"]
    ports = ["--port", str(49_152 + 16 * job.number)]  # every instance talks to its processes through up to ten
    tool = [SANITIZER, "--tool", job.tool, *watched, *ports, "--log-file", str(log)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    stopped = ["timeout", "--signal=INT", "--kill-after=10", str(limit)]
    given: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    start = time.monotonic()
    try:
        output = subprocess.run([*tool, *stopped, *job.command], **given, timeout=2 * limit).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    row = {
        "command": f"compute-sanitizer --tool {job.tool} python {shlex.join(job.command[1:])}",
        "commit": report.COMMIT,
        "tool": job.tool,
        "file": job.file,
        "seconds": round(time.monotonic() - start, 1),
        **outcome(job.tool, log.read_text() if log.exists() else "", output.decode()),
    }
    print({key: value for key, value in row.items() if key != "commit"}, flush=True)
    return row


def outcome(tool: str, log: str, output: str) -> dict[str, Any]:
    """What a tool's log and pytest's output say. A test that fails is told as well: it may hide what comes after it."""
    found = [int(count) for count in SUMMARIES[tool].findall(log)]
    cases = {word: re.findall(rf"(\d+) {word}", output) for word in ("passed", "failed", "skipped")}
    row: dict[str, Any] = {word: int(counts[-1]) if counts else 0 for word, counts in cases.items()}
    row |= {"errors": sum(found) if found else None, "stopped": "KeyboardInterrupt" in output}
    if not found or any(found) or row["failed"]:
        row["note"] = (log[:2000] or output[-600:]).strip()
    return row


def metrics_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """errors is left out while a tool has not told its own."""
    tests = [row for row in rows if row["file"] != "control"]
    found = [row["errors"] for row in tests]
    metrics: dict[str, float] = {"sanitizer.cases": sum(row["passed"] + row["failed"] for row in tests)}
    metrics["sanitizer.without_summary"] = found.count(None)
    metrics["sanitizer.controls_found"] = sum(bool(row["errors"]) for row in rows if row["file"] == "control")
    return metrics if None in found else {"sanitizer.errors": sum(found)} | metrics


def control(mistake: str) -> None:
    """A request slot that no table has, which a plan in C++ reads, or a page that no pool has, in Triton."""
    import torch
    from vllm_kvplug.kernels.hopper import HopperPlan

    from vllm_kvplug import ops

    cuda = torch.device("cuda")
    lengths = torch.full((1, 1), 16, dtype=torch.int32, device=cuda)
    slot, chunks = torch.zeros(1, dtype=torch.int32, device=cuda), torch.zeros(1, 64, dtype=torch.int32, device=cuda)
    if mistake == "cuda":
        HopperPlan(1, 1, 1, 1, 64, cuda).update(slot + 99, lengths)
    else:
        query, pool = torch.zeros(1, 1, 64, device=cuda), torch.zeros(1, 16, 128, device=cuda)
        directory = torch.zeros(1, 1, 1, dtype=torch.int32, device=cuda)
        out = torch.empty_like(query)
        ops.decode_attention(out, query, pool, directory, chunks + 1000, slot, lengths, 0, 1, 1.0)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=int, default=40, metavar="SECONDS", help="of every process")
    parser.add_argument("--at-once", type=int, default=16, metavar="PROCESSES")
    parser.add_argument("--control", choices=CONTROL, help="make a mistake, and nothing else")
    args = parser.parse_args()
    if args.control:
        return control(args.control)
    if args.out is None:
        parser.error("--out is needed")
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs, and what they start, ignore it
    asked = [("memcheck", "control", mistake) for mistake in CONTROL]
    asked += [(tool, *tests) for tests in SELECTIONS for tool in TOOLS]
    jobs = [Job(number, *one) for number, one in enumerate(asked)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(partial(run, limit=args.limit, folder=Path(folder)), jobs))
    report.write(args.out, report.result("sanitize", metrics_of(rows), rows))


if __name__ == "__main__":
    main()

"""Result files: what was measured, by which command, on which commit, versions and machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def _commit() -> str:
    """Commit of this checkout; a copy without .git is told by KVPLUG_COMMIT."""
    if "KVPLUG_COMMIT" in os.environ:
        return os.environ["KVPLUG_COMMIT"]
    git = ["git", "-C", str(Path(__file__).parent)]
    dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    return head + ("-dirty" if dirty else "")


COMMIT = _commit()
"""Of the code that runs: taken when it starts, since a checkout may move on while a long measurement runs."""


def versions() -> dict[str, str]:
    import torch
    import vllm

    found = {"python": platform.python_version(), "torch": torch.__version__, "vllm": vllm.__version__}
    for package in ("transformers", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    cores = os.cpu_count()
    if shutil.which("nvidia-smi"):  # torch would initialise CUDA, and the next engine then starts slowly
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
        return f"{len(names)} x {names[0]}, {cores} CPU cores"
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ":unknown")
    return f"CPU {model.split(':')[1].strip()}, {cores} cores"


def result(name: str, metrics: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "command": "python -m " + " ".join([_module(), *sys.argv[1:]]),
        "commit": COMMIT,
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "machine": machine(),
        "metrics": metrics,
        "rows": rows,
    }


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else sys.argv[0]

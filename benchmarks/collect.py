"""Puts parts that different commands and machines measured into one result file.

    python -m benchmarks.collect NAME PART.json ... [--out FILE]

Metrics are merged; each part keeps its command, commit, versions and machine in `rows`. A part that is itself one of
the committed result files keeps its own rows there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import report


def read(path: Path) -> dict[str, Any]:
    part = json.loads(path.read_text())
    return part | {"rows": [], "rows_in": path.name} if path.resolve().parent == report.RESULTS.resolve() else part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = [read(path) for path in args.parts]
    metrics: dict[str, float] = {}
    for part in parts:
        clash = metrics.keys() & part["metrics"].keys()
        if clash:
            parser.error(f"measured twice: {sorted(clash)}")
        metrics |= part["metrics"]
    whole = report.result(args.name, metrics, parts)
    whole["machine"] = "; ".join(dict.fromkeys(part["machine"] for part in parts))
    whole["commit"] = ", ".join(dict.fromkeys(part["commit"] for part in parts))
    report.write(args.out or report.RESULTS / f"{args.name}.json", whole)


if __name__ == "__main__":
    main()

"""What README claims is what was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_readme_is_rendered_from_the_results():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.render", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

"""Tests of Triton kernels: on a GPU where there is one, else on CPU tensors in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so an interpreted run is a process of its own: a test file runs
itself, with `run_interpreted`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

runs_kernel = pytest.mark.skipif(not (INTERPRETED or DEVICE == "cuda"), reason="needs a GPU, or the interpreter")


def starts_interpreter(test):
    """For the test that calls `run_interpreted`. Where there is a GPU the other tests of the file run as they are."""
    needless = INTERPRETED or DEVICE == "cuda" or importlib.util.find_spec("triton") is None
    return pytest.mark.skipif(needless, reason="runs this file without a GPU, and needs triton")(test)


def run_interpreted(file: str, select: str = "") -> None:
    """Asserts that a test file, or what `select` (pytest's -k) leaves of it, passes in the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", file, "-k", select]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:]

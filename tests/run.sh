#!/usr/bin/env bash
# All tests on a fresh machine: makes the environment and the small model, checks the style, runs pytest.
# Two files of tests run side by side, since most of them keep one core busy. Arguments go to pytest; -n 0 runs all in
# one process.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(bash benchmarks/venv.sh)
"$python" -m benchmarks.small_model
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy vllm_kvplug
exec "$python" -m pytest tests -n 2 --dist loadfile "$@"

#!/usr/bin/env bash
# All tests on a fresh machine: makes the environment and the small model, checks the style, runs pytest.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(bash benchmarks/venv.sh)
"$python" -m benchmarks.small_model
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy vllm_kvplug
exec "$python" -m pytest tests "$@"

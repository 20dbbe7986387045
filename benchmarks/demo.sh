#!/usr/bin/env bash
# The main job, end to end on a fresh machine: installs, makes a small model, serves it with a KV policy by
# stock vLLM, asks it about a long prompt, and shows the KV bytes it holds. Arguments go to benchmarks/demo.py.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(bash benchmarks/venv.sh)
exec "$python" -m benchmarks.demo "$@"

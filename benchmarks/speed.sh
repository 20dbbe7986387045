#!/usr/bin/env bash
# Measurements of speed on one GPU, one after another, and what tells why: each leaves a result file in OUT.
#
#     bash benchmarks/speed.sh SHAPES SMALL_MODEL TASKS OUT SECONDS PART ...
#
# SHAPES is a folder of models' config.json files (llama-3.1-8b, qwen3-30b-a3b), SMALL_MODEL and TASKS those of the
# evaluation. Parts begin in the order given, as long as any of SECONDS is left; what is cut short says 124, and result
# files hold what was measured until then. Nothing else may run on the machine.
set -uo pipefail
cd "$(dirname "$0")/.."
shapes=$1 small=$2 tasks=$3 out=$4 limit=$5 begun=$SECONDS
shift 5
mkdir -p "$out/logs"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
plain=$shapes/llama-3.1-8b
engines=(python3 -m benchmarks.gpu_engine "$plain")

declare -A parts=(
    [gated]="python3 -m benchmarks.gated_engine $plain --out $out"
    [decode]="${engines[*]} --cases decode --out $out/decode.json"
    [decode220]="${engines[*]} --cases decode --shapes 220000x1 --out $out/decode220.json"
    [tax]="${engines[*]} --cases tax --out $out/tax.json"
    [concurrency]="${engines[*]} --cases concurrency --out $out/concurrency.json"
    [saturated]="${engines[*]} --cases saturated --out $out/saturated.json"
    [tail]="${engines[*]} --cases tail --out $out/tail.json"
    [parity]="python3 -m benchmarks.gpu_engine $small --cases parity --tasks $tasks --out $out/parity.json"
    [yakv8b]="python3 -m benchmarks.yakv_engine $plain --out $out/llama-3.1-8b.json"
    [yakv30b]="python3 -m benchmarks.yakv_engine $shapes/qwen3-30b-a3b --out $out/qwen3-30b-a3b.json"
    [kernel]="python3 -m benchmarks.decode_kernel --out $out/kernel.json"
    [profile]="bash benchmarks/profile_decode.sh $out/profile.txt"
    [sanitize]="python3 -m benchmarks.sanitize --out $out/sanitize.json --limit 60"
)

for part in "$@"; do
    left=$((limit - (SECONDS - begun)))
    [ "$left" -gt 5 ] || break
    timeout --kill-after=2 "$left" ${parts[$part]:?"unknown part $part; there are: ${!parts[*]}"} >"$out/logs/$part.log" 2>&1
    echo "$part: exit status $?, $((SECONDS - begun)) s"
done

#!/usr/bin/env bash
# What a launch of decode attention waits for, by Nsight Compute: bash benchmarks/profile_decode.sh FILE [CASE]
# FILE gets ncu's text: bandwidth, why warps stall (memory, barriers, instructions not there yet), registers, parts. One
# launch is profiled, with caches as the launch before left them; the benchmark's own times mean nothing then.
set -euo pipefail
cd "$(dirname "$0")/.."
file=$1 case=${2:-ragged_1x131072_7x6553}
ncu=$(command -v ncu || echo /usr/local/cuda/bin/ncu)
[ -x "$ncu" ] || { echo "there is no ncu here" | tee "$file"; exit 1; }
sections=(SpeedOfLight MemoryWorkloadAnalysis WarpStateStats SchedulerStats LaunchStats Occupancy SourceCounters)
"$ncu" "${sections[@]/#/--section=}" --kernel-name regex:decode_attention_kernel --launch-skip 4 --launch-count 1 \
  --cache-control none --graph-profiling node --kill yes \
  python3 -m benchmarks.decode_kernel --out /dev/null --kernels ours --cases "$case" > "$file" 2>&1 || true
if grep -q ERR_NVGPUCTRPERM "$file"; then
  echo "this machine does not let ncu read its counters (ERR_NVGPUCTRPERM)"
  exit 1
fi
grep -q "Duration" "$file" || { tail -5 "$file"; exit 1; }

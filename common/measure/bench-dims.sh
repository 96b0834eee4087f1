#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench-dims: bench-dims.sh STEP...: step 56 at each of its head dims and its peers one after the other, without a
# mask and causal, in REPEAT rounds (default 2), into plots/results/GPU-dims.csv. The rows are in build/dims.csv as they
# come.
set -euo pipefail
. common/measure/shell.sh
need_gpu
[ $# -gt 0 ] || { echo "$command: step 56 needs sm_90a" >&2; exit 3; }
begin_rows build/dims.csv "$@"
start_peers
shape="--type bf16 --batch 8 --heads 16 --seqlen 8192"
for ((i = 1; i <= ${REPEAT:-2}; i++)); do
  for n in 96 256 128 192 64; do
    problem 56 $shape --head-dim $n
    problem 56 $shape --head-dim $n --causal
  done
  problem 56 $shape --head-dim 192 --head-dim-v 128
done
end_peers
end_rows
finish dims
echo "measured in $SECONDS s"

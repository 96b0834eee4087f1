#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench-gpus: bench-gpus.sh STEP...: the steps of Part VII on GPUS GPUs (default 2) and on one, in turns, batch 1, 16
# heads of 128, bf16, with both carriers, into plots/results/GPU-gpus.csv. LENGTHS are the lengths, CACHES the keys of
# step 73's caches. The peers are those of peers_gpus.py, where PyTorch is. The rows are in build/gpus.csv as they come.
set -euo pipefail
. common/measure/shell.sh
need_gpu
begin_rows build/gpus.csv "$@"
at="--batch 1 --heads 16 --head-dim 128 --type bf16 --iters 10 --gpus ${GPUS:-2}"
for length in ${LENGTHS-8192 16384 32768 65536}; do
  step 70 $at --seqlen "$length"
  step 71 $at --seqlen "$length"
  step 71 $at --seqlen "$length" --link copies
  [ "$length" -gt 32768 ] || step 71 $at --seqlen "$length" --leave-sms 16
  for link in nccl copies; do step 72 $at --seqlen "$length" --causal --link $link; done
  for mask in --causal ""; do step 75 $at --seqlen "$length" $mask --link copies; done
  step 74 $at --seqlen "$length" --causal --link copies
  "$PYTHON" common/measure/peers_gpus.py --csv "$csv" --gpus "${GPUS:-2}" --seqlen "$length" || true
  [ "$length" = 8192 ] || [ "$length" = 32768 ] || continue
  step 74 $at --seqlen "$length" --causal
  step 70 $at --seqlen "$length" --causal
  step 71 $at --seqlen "$length" --causal
  step 71 $at --seqlen "$length" --causal --link copies
done
for keys in ${CACHES-16384 131072 1048576}; do
  step 73 --batch 1 --heads 64 --kv-heads 8 --head-dim 128 --seqlen 1 --seqlen-k "$keys" --iters 20 --gpus "${GPUS:-2}"
done
end_rows
finish gpus
echo "measured in $SECONDS s"

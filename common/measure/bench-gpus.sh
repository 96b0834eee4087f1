#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench-gpus: bench-gpus.sh STEP...: the steps of Part VII on GPUS GPUs (default 2) and on one, in turns, batch 1, 16
# heads of 128, bf16, with both carriers, into plots/results/GPU-gpus.csv, or GPU-gpus-4.csv for four. LENGTHS are the
# lengths, CACHES the keys of step 73's caches. The peers are those of peers_gpus.py, where PyTorch is. The rows are in
# build/gpus.csv, or build/gpus-4.csv, as they come.
set -euo pipefail
. common/measure/shell.sh
need_gpu
name=gpus
[ "${GPUS:-2}" = 2 ] || name+=-$GPUS
begin_rows "build/$name.csv" "$@"
at="--batch 1 --heads 16 --head-dim 128 --type bf16 --iters 5 --gpus ${GPUS:-2}"
for length in ${LENGTHS-8192 16384 32768 65536 131072}; do
  step 71 $at --seqlen "$length" --link copies
  step 72 $at --seqlen "$length" --link copies --causal
  for n in 75 76; do for mask in --causal ""; do step $n $at --seqlen "$length" --link copies $mask; done; done
  "$PYTHON" common/measure/peers_gpus.py --csv "$csv" --gpus "${GPUS:-2}" --seqlen "$length" || true
  [ "$length" -le 65536 ] || continue
  step 70 $at --seqlen "$length"
  step 71 $at --seqlen "$length"
  step 72 $at --seqlen "$length" --causal
  step 74 $at --seqlen "$length" --link copies --causal
  [ "$length" -le 32768 ] || continue
  for sms in 16 32; do step 71 $at --seqlen "$length" --leave-sms $sms; done
  [ "$length" = 8192 ] || [ "$length" = 32768 ] || continue
  for n in 70 71 74 75 76; do step $n $at --seqlen "$length" --causal; done
  step 71 $at --seqlen "$length" --link copies --causal
done
for keys in ${CACHES-4096 16384 131072 1048576}; do
  step 73 --batch 1 --heads 64 --kv-heads 8 --head-dim 128 --seqlen 1 --seqlen-k "$keys" --iters 20 --gpus "${GPUS:-2}"
done
end_rows
finish $name
echo "measured in $SECONDS s"

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench-backward: bench-backward.sh STEP...: the steps of Part VI and their peers' backward passes, one after the
# other, into plots/results/GPU-backward.csv. The headline problem is measured in REPEAT rounds (default 3), in fp16 and in
# bf16; step 60, whose scores are in memory, at batch 1. Then, in bf16, the steps but 60 over the sequence LENGTHS, at both
# head dims. The rows are in build/backward.csv as they come.
set -euo pipefail
. common/measure/shell.sh
need_gpu
begin_rows build/backward.csv "$@"
repeat=${REPEAT:-3}
lengths=${LENGTHS-512 1024 2048 4096 16384}
peers=backward
start_peers
large=$(printf '%s\n' "${steps[@]}" | grep -v '^60$' || true)

# at SEQLEN HEAD_DIM: the batch fills the chip, and half of it is enough at the longest.
at() { echo "--batch $(($1 > 8192 ? 8 : 16)) --heads 16 --seqlen $1 --head-dim $2"; }

for ((i = 1; i <= repeat; i++)); do
  echo "round $i of $repeat"
  for type in fp16 bf16; do
    problem "${steps[*]}" --type $type --batch 1
    problem "$large" --type $type $(at 8192 128)
  done
done
echo "sequence lengths"
for n in $lengths; do problem "$large" --type bf16 $(at "$n" 128); done
for n in 8192 $lengths; do problem "$large" --type bf16 $(at "$n" 64); done
end_peers
end_rows
finish backward
echo "measured in $SECONDS s"

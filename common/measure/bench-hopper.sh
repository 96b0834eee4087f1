#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench-hopper: bench-hopper.sh STEP...: the steps of Part IV and step 15, from which they start,
# with their peers, one after the other, into plots/results/GPU-hopper.csv. The headline problem is
# measured in REPEAT rounds (default 3), in fp16, in bf16 and in fp8; then, in bf16, the last step (or
# those that CURVES names) over the sequence LENGTHS, at both head dims, and in fp8 those that take it.
# What takes --causal is measured with it, too. The rows are in build/hopper.csv as they come, the most
# important first.
set -euo pipefail
. common/measure/shell.sh
need_gpu
[ $# -gt 1 ] || { echo "$command: the steps of Part IV need sm_90a" >&2; exit 3; }
begin_rows build/hopper.csv "$@"
repeat=${REPEAT:-3}
lengths=${LENGTHS-512 1024 2048 4096 16384}
start_peers

# taking WHAT KEY NN...: those of these steps that --describe it: bf16 of their types, --causal of what
# they take.
taking() {
  local n
  for n in "${@:3}"; do ! among "$1" "$(describe "$n" "$2")" || echo "$n"; done
}
in_fp16=$(taking fp16 types "${steps[@]}")
in_bf16=$(taking bf16 types "${steps[@]}")
in_fp8=$(taking fp8 types "${steps[@]}")
causal=$(taking --causal takes $in_bf16)
curves=${CURVES:-$({ tail -1 <<<"$in_bf16" && tail -1 <<<"$causal"; } | sort -u)}
causal_curves=$(taking --causal takes $curves)

# at SEQLEN HEAD_DIM: the batch fills the chip, and half of it is enough at the longest.
at() { echo "--batch $(($1 > 8192 ? 8 : 16)) --heads 16 --seqlen $1 --head-dim $2"; }

fp8() {
  problem "$in_fp8" --type fp8 $(at "$1" 128)
  problem "$in_fp8" --type fp8 --causal $(at "$1" 128)
}

round() {
  problem "$in_fp16" $(at 8192 128)
  problem "$in_bf16" --type bf16 $(at 8192 128)
  problem "$causal" --type bf16 --causal $(at 8192 128)
  fp8 8192
  ask_peers matmul
}

once() {
  local n
  for n in $lengths; do
    problem "$curves" --type bf16 $(at "$n" 128)
    problem "$causal_curves" --type bf16 --causal $(at "$n" 128)
    fp8 "$n"
  done
  for n in 8192 $lengths; do
    problem "$curves" --type bf16 $(at "$n" 64)
    problem "$causal_curves" --type bf16 --causal $(at "$n" 64)
  done
}

for ((i = 1; i <= repeat; i++)); do
  echo "round $i of $repeat"
  round
done
echo "sequence lengths"
once
end_peers
end_rows
finish hopper
echo "measured in $SECONDS s; 'make plot' draws it"

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make sustained: sustained.sh STEP...: the speed that lasts. Each kernel runs alone for three seconds after two seconds
# of rest; the last two are recorded, with clock rate and power. Of these steps the last of Part II and the last of Part IV
# in 16 bits and in fp8, at 8192 with both head dims, beside their peers, and bare loops of mma; or, with SHAPES="OPTIONS;
# OPTIONS", each of them there. REPEAT rounds (default 2), into plots/results/GPU-sustained.csv; a row replaces the row of
# the same problem.
set -euo pipefail
. common/measure/shell.sh
need_gpu

headlines() {
  local step n plain='' bf16='' fp8='' d mask
  for step; do
    n=$(number_of "$step")
    [[ $n < 50 ]] || continue
    if [[ $(header "$n" needs) != sm_90* ]]; then
      ! is_plain "$step" || plain=$n
    elif among --causal "$(header "$n" takes)"; then
      if among fp8 "$(header "$n" takes)"; then fp8=$n; else bf16=$n; fi
    fi
  done
  for mask in "" --causal; do
    for d in 128 64; do
      [ -z "$bf16" ] || echo "--type bf16 --head-dim $d $mask|./step-$bf16|flash-attention-3-bf16 flash-attn-4 cudnn"
    done
    [ -z "$fp8" ] || echo "--head-dim 128 $mask|./step-$fp8|flash-attention-3-fp8"
  done
  for d in 128 64; do
    [ -z "$plain" ] || echo "--head-dim $d|./step-$plain|flash-attention-2 cudnn"
  done
  echo "loop|mma mma-zeros"
}

if [ -n "${SHAPES-}" ]; then
  while IFS= read -r problem; do
    for step; do echo "$problem|./step-$(number_of "$step")"; done
  done < <(tr ';' '\n' <<<"$SHAPES")
else
  headlines "$@"
fi | "$PYTHON" common/measure/rounds.py sustained --rounds "${REPEAT:-2}" "$results/$GPU-sustained.csv"

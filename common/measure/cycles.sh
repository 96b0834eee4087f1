#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make cycles: cycles.sh STEP...: elapsed SM clocks, time, clock rate and power of each step and its variants at the
# step's headline problem, in REPEAT alternating rounds (default 7), into plots/results/GPU-cycles.csv; with
# SHAPES="OPTIONS; OPTIONS" the steps alone, beside each other, at these problems. A row replaces the row of the same
# problem, so STEPS="05 06" measures a part.
set -euo pipefail
. common/measure/shell.sh
need_gpu

# headlines NN: without a mask and causal, of a step of Part IV that takes both; of one that decodes, its own default.
headlines() {
  problems_of "$1"
  if [[ $(header "$1" needs) == sm_90* ]]; then
    echo ""
    ! among --causal "$(header "$1" takes)" || echo --causal
  elif [ "$(value "$(describe "$1" gpu)" seqlen)" = 1 ]; then
    echo ""
  else
    echo "${measured[0]}"
  fi
}

if [ -n "${SHAPES-}" ]; then
  mapfile -t programs < <(for step; do echo "./step-$(number_of "$step")"; done)
  tr ';' '\n' <<<"$SHAPES" | while IFS= read -r problem; do echo "$problem|${programs[*]}"; done
else
  for step; do
    n=$(number_of "$step")
    programs=./step-$n
    for patch in "steps/$step/variants"/*.patch; do
      name=${patch##*/} program=./step-$n-${name%.patch}
      [ ! -x "$program" ] || programs+=" $program"
    done
    headlines "$n" | while IFS= read -r problem; do echo "$problem|$programs"; done
  done
fi | "$PYTHON" common/measure/rounds.py cycles --rounds "${REPEAT:-7}" "$results/$GPU-cycles.csv"

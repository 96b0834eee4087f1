#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make variants-NN: variants.sh NN NAME...: a step beside its variants and the step before it. Each is
# checked; on a GPU they then alternate in REPEAT rounds (default 7), with the step once more as the
# control, into plots/results/GPU-variants-NN.csv. In each round a program
# launches for SECONDS_EACH (default 0.6): of 0.2 the control's times differed by 6%, because the power limit takes a while
# to settle, and its clocks by 0.3%. Without a GPU they are counted on the emulator.
set -euo pipefail
. common/measure/shell.sh
n=$1
shift
[ $# -gt 0 ] || { echo "make variants-$n: step $n has no variants: steps/$n-*/variants/NAME.patch" >&2; exit 2; }
# The step that this one builds on comes along: a variant may go half of the way.
before=$(header "$n" before)
[ -z "$before" ] || build "step-$before"
programs=(${before:+"./step-$before"} "./step-$n" "${@/#/./step-$n-}")
device=gpu
[ -n "$GPU" ] && [ -n "$NVCC" ] || device=cpu
failed=()
problems_of "$n"
for program in "${programs[@]}"; do
  for problem in "${checked[@]/%/${also_checked:+ $also_checked}}"; do
    mode=--check-only
    [ $device = gpu ] || mode=
    status=0
    $program --device $device $problem $mode || status=$?
    case $status in
      0 | 2 | 3) ;;
      *) failed+=("$program $problem") ;;
    esac
  done
done
for program in "${failed[@]}"; do echo "WRONG: $program" >&2; done
[ ${#failed[@]} = 0 ] || exit 1
[ $device = gpu ] || { echo "SKIP: no GPU, so no times"; exit; }

for problem in "${measured[@]}"; do echo "$problem|${programs[*]} ./step-$n"; done |
  "$PYTHON" common/measure/rounds.py variants --step "$n" --rounds "${REPEAT:-7}" --seconds "${SECONDS_EACH:-0.6}" \
    "$results/$GPU-variants-$n.csv"

#!/usr/bin/env bash
# make variants-NN: variants.sh NN NAME...: a step beside its variants and the step before it. Each is
# checked; on a GPU they are then measured in REPEAT rounds (default 3), one after the other in each,
# into plots/results/GPU-variants-NN.csv. Without a GPU they are counted on the emulator.
set -euo pipefail
. common/measure/shell.sh
n=$1
shift
[ $# -gt 0 ] || { echo "make variants-$n: step $n has no variants: steps/$n-*/variants/NAME.patch" >&2; exit 2; }
# The step that this one builds on comes along: a variant may go half of the way.
before=$(sed -nE 's|^// Before +step ([0-9]{2}).*|\1|p' steps/"$n"-*/attention.cu)
[ -z "$before" ] || make -s "step-$before"
programs=(${before:+"./step-$before"} "./step-$n" "${@/#/./step-$n-}")
device=gpu
[ -n "$GPU" ] && [ -n "$NVCC" ] || device=cpu
failed=()

# A shape of a few tiles for both head dims. A variant may take one of them only, or need more shared
# memory than there is: it says so and is left out.
for program in "${programs[@]}"; do
  for head_dim in 64 128; do
    shape="--batch 1 --heads 2 --seqlen 512 --head-dim $head_dim"
    mode=--check-only
    [ $device = gpu ] || mode=
    status=0
    $program --device $device $shape $mode || status=$?
    case $status in
      0 | 2 | 3) ;;
      *) failed+=("$program $shape") ;;
    esac
  done
done
for program in "${failed[@]}"; do echo "WRONG: $program" >&2; done
[ ${#failed[@]} = 0 ] || exit 1
[ $device = gpu ] || { echo "SKIP: no GPU, so no times"; exit; }

# Batch 1 where a launch at the default shape takes seconds.
batch=
case $n in 00 | 02 | 03) batch="--batch 1" ;; esac
csv=build/variants-$n.csv
rm -f "$csv"
rounds=${REPEAT:-3}
for ((round = 1; round <= rounds; round++)); do
  echo "round $round of $rounds"
  for program in "${programs[@]}"; do
    status=0
    $program --device gpu $batch --csv "$csv" || status=$?
    case $status in
      0 | 2 | 3) ;;
      *) exit $status ;;
    esac
  done
done
finish "variants-$n"

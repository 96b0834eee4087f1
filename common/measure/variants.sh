#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make variants-NN: variants.sh NN NAME...: a step beside its variants and the step before it. Each is
# checked; on a GPU they are then measured in REPEAT rounds (default 3), one after the other in each,
# into plots/results/GPU-variants-NN.csv. Without a GPU they are counted on the emulator.
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

# What is checked, a shape of a few tiles for both head dims, and what is measured: the step's own
# problem. A program that does not take one says so and is left out: a variant may take one head dim
# only or need more shared memory than there is, and the step before takes less.
checked=("--batch 1 --heads 2 --seqlen 512 --head-dim 64" "--batch 1 --heads 2 --seqlen 512 --head-dim 128")
measured=("")
also_checked=
decode="--heads 64 --kv-heads 8 --seqlen 1 --head-dim 128"
case $n in
  00 | 02 | 03) measured=("--batch 1") ;; # a launch at the default shape takes seconds
  16) measured=("" "--seqlen 1024") ;;
  20) also_checked=--causal measured=("--causal" "--causal --batch 1 --seqlen 4096") ;;
  21) also_checked=--causal measured=("--causal --batch 8 --seqlen 8191" "--causal --batch 8") ;;
  22) also_checked=--causal measured=("--causal --batch 8" "--causal --batch 8 --layout bnhd" "--causal --seqlen 1024") ;;
  23) also_checked="--kv-heads 1" measured=("--batch 4 --heads 64 --kv-heads 8" "--batch 4 --heads 64" "--causal --batch 8") ;;
  24) also_checked="--rope halves" measured=("--causal --batch 8 --rope halves" "--causal --seqlen 512 --rope halves") ;;
  26 | 27)
    checked=("--batch 2 --heads 8 --kv-heads 1 --seqlen 1 --seqlen-k 515 --head-dim 64"
      "--batch 1 --heads 8 --kv-heads 2 --seqlen 1 --seqlen-k 1030 --head-dim 128")
    measured=()
    for shape in "1 1024" "1 4096" "1 16384" "1 65536" "1 131072" "16 1024" "16 4096" "16 16384" "64 1024" "64 4096"; do
      read -r batch keys <<<"$shape"
      measured+=("--batch $batch --seqlen-k $keys $decode")
    done
    ;;
  28)
    also_checked="--window 100"
    measured=("--batch 2 --seqlen 16384 --window 1024" "--batch 2 --seqlen 16384 --window 256")
    ;;
  29)
    checked=("--batch 1 --heads 2 --seqlen 500 --head-dim "{64,192,256})
    measured=("--batch 4 --head-dim "{64,192,256})
    ;;
  50) also_checked=--causal measured=("--causal --batch 8") ;;
  36) measured=("" "--seqlen 1024" "--head-dim 64") ;;
  39) also_checked=--causal measured=("--causal" "--causal --seqlen 1024" "--head-dim 64" "--causal --head-dim 64") ;;
  41) checked=("--batch 1 --heads 2 --seqlen 512") measured=("" "--causal" "--seqlen 512" "--causal --seqlen 1024") ;;
esac

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

csv=build/variants-$n.csv
rm -f "$csv"
rounds=${REPEAT:-3}
for ((round = 1; round <= rounds; round++)); do
  echo "round $round of $rounds"
  for problem in "${measured[@]}"; do
    for program in "${programs[@]}"; do
      status=0
      $program --device gpu $problem --csv "$csv" || status=$?
      case $status in
        0 | 2 | 3) ;;
        *) exit $status ;;
      esac
    done
  done
done
finish "variants-$n"

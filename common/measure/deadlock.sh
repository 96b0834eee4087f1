#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make check-deadlock: a kernel that waits at an mbarrier for what never comes must end with an error, and
# the GPU must not hang: the program ends by itself, with exit status 1 and one line. Of two steps a copy is
# spoilt, compiled for the GPU and run.
set -euo pipefail
seconds=60  # as long as a run may take
shape="--batch 4 --heads 16 --seqlen 1024"  # step 36: several tiles per block

skip() { echo "SKIP: deadlocks on a GPU: $1"; exit; }
[ -n "$GPU" ] || skip "no GPU here"
[ -n "$NVCC" ] || skip "nvcc is not on the PATH"
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)
[ "$capability" = 9.0 ] || skip "the GPU is of compute capability $capability, and mbarriers wait in steps for 9.0"

# deadlock STEP TEXT REPLACEMENT WHAT: TEXT is in one line of the step. (Called before ||, where set -e ends
# nothing.)
deadlock() {
  local number=${1%%-*} source=steps/$1/attention.cu copy=build/variants/$1/deadlock
  local program=build/cuda-sm_90a/bin/step-$number-deadlock log=build/deadlock-$number
  [ "$(grep -cF -- "$2" "$source")" = 1 ] || { echo "$source: not one line has '$2'" >&2; return 1; }
  mkdir -p "$copy" || return 1
  awk -v text="$2" -v other="$3" 'at = index($0, text) {
    $0 = substr($0, 1, at - 1) other substr($0, at + length(text)) } { print }' "$source" >"$copy/attention.cu" || return 1
  make --no-print-directory NVCC="$NVCC" ARCH=sm_90a "$program" >"$log.make" 2>&1 ||
    { cat "$log.make"; return 1; }
  local status=0 begin=$SECONDS
  timeout --kill-after=5 $seconds "$program" --device gpu --check-only $shape >"$log.out" 2>"$log.err" </dev/null ||
    status=$?
  if [ $status = 1 ] && [ "$(wc -l <"$log.err")" = 1 ] && grep -q ': the kernel failed: ' "$log.err"; then
    echo "$number, $4: ended after $((SECONDS - begin)) s: $(cat "$log.err")"
  else
    cat "$log.out" "$log.err"
    echo "$number, $4: FAILED: exit status $status after $((SECONDS - begin)) s"
    return 1
  fi
}

failed=0
deadlock 30-tma 'mbarrier_arrive_expect_tx(smem.V_full, sizeof smem.V)' \
  'mbarrier_arrive_expect_tx(smem.V_full, sizeof smem.V + 1)' "a byte too many expected" || failed=1
deadlock 36-persistent 'mbarrier_arrive(Q.empty[stage]);' ';' "nobody says that Q is empty" || failed=1
exit $failed

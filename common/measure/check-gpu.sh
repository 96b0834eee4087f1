#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make check-gpu: check-gpu.sh TESTS NN...: a deadlock must end (in steps 30 and 36); the steps are right on the GPU, the
# newest first, and before them the kernel that takes every problem; so they are under each tool of
# compute-sanitizer; and with more than 2^31 elements. SANITIZE names the tools; empty, none. They spend most of their
# time on the host: several run at once, but for the last, which take the GPU's memory.
set -euo pipefail

# check-gpu.sh --under TOOL PROGRAM OPTION...: a program under a tool. racecheck does not follow a barrier of the
# readers and then one arrival for all (chapter 39): of steps that release a word so it checks a variant. NCCL tries
# calls that may fail, and goes on.
if [ "$1" = --under ]; then
  tool=$2 program=$3
  [ "$tool" != racecheck ] || [ ! -x "$program-each-arrives" ] || program+=-each-arrives
  [[ $program != ./step-7* ]] || api="--report-api-errors no"
  exec compute-sanitizer --tool "$tool" ${api-} --error-exitcode 9 "$program" "${@:4}"
fi

[ -n "$GPU" ] || { echo "make check-gpu: no GPU (nvidia-smi finds none)" >&2; exit 2; }
[ -n "$NVCC" ] || { echo "make check-gpu: nvcc is not on the PATH" >&2; exit 2; }
export tests=$1 STEPS_DEVICE=gpu
shift
mkdir -p build/check-gpu

# left_out TOOL NN: the chapter that says why this tool reports what is no fault of this step, if it does.
left_out() {
  case "$1 $2" in
    "racecheck 54" | "racecheck 85" | "racecheck 86" | "racecheck 89") echo 39 ;;
    "racecheck 64" | "racecheck 69" | "racecheck 74") echo 64 ;;
    "racecheck 68" | "racecheck 80" | "racecheck 81" | "racecheck 88" | "racecheck 90" | "racecheck 91" | "racecheck 92") echo 66 ;;
    "racecheck 87") echo 87 ;;
    "initcheck 7"?) echo 70 ;;
    *) return 1 ;;
  esac
}
export -f left_out

# one TOOL NN, or TOOL any-problem; without a tool, 'alone', or 'large'. One line: what was found. If it failed, the
# command to run again, and what that said.
one() {
  local begin=$SECONDS log="build/check-gpu/$1-$2.log" prefix='' cases='every step is right*' chapter
  ! chapter=$(left_out "$@") || { echo "$2, $1: left out, it reports what is no fault: chapter $chapter"; return; }
  [ "$2" != any-problem ] || cases='every problem is posed*'
  case $1 in
    alone) ;;
    large) cases='offsets beyond*' ;;
    *) prefix="common/measure/check-gpu.sh --under $1" ;;
  esac
  if STEPS_PREFIX=$prefix STEPS_ONLY=$2 "$tests" --test-case="$cases" >"$log" 2>&1; then
    echo "$2, $1: right, $((SECONDS - begin)) s$(grep '^SKIP' "$log" | sort -u | sed 's/^/; /' | tr -d '\n')"
  else
    # At once: other checks print beside this one.
    printf '%s\n' "FAIL ANY_PROBLEM=$ANY_PROBLEM STEPS_DEVICE=gpu STEPS_PREFIX='$prefix' STEPS_ONLY=$2 $tests --test-case='$cases'" "$(sed 's/^/\t/' "$log")"
    return 1
  fi
}
export -f one

# run JOBS TOOL...: everything under these tools, so many at once.
mapfile -t steps < <(echo any-problem; printf '%s\n' "$@" | sort -r)
run() {
  local what tool
  for what in "${steps[@]}"; do
    for tool in "${@:2}"; do echo "$tool $what"; done
  done | xargs -r -P "$1" -L 1 bash -c 'one $0 $1'
}

jobs=$(getconf _NPROCESSORS_ONLN)
jobs=$((jobs < 16 ? jobs : 16))
read -ra tools <<<"${SANITIZE-memcheck racecheck initcheck synccheck}"
command -v compute-sanitizer >/dev/null || { echo "SKIP: compute-sanitizer is not installed"; tools=(); }
deadlocks=0
[[ " $* " != *" 30 "* && " $* " != *" 36 "* ]] || deadlocks=1
failed=0 done=0 all=$((deadlocks + ${#steps[@]} * (2 + ${#tools[@]}) - 1))
{
  if [ $deadlocks = 1 ]; then
    common/measure/deadlock.sh >build/check-gpu/deadlock.log 2>&1 || failed=1
    [ $failed = 0 ] && echo "deadlocks: $(paste -sd';' build/check-gpu/deadlock.log)" ||
      { echo "FAIL make check-deadlock"; sed 's/^/\t/' build/check-gpu/deadlock.log; }
  fi
  run "$jobs" alone || failed=1
  [ ${#tools[@]} = 0 ] || run "$jobs" "${tools[@]}" || failed=1
  steps=("${steps[@]:1}")
  run 1 large || failed=1
  exit $failed
} | while IFS= read -r line; do
  [[ $line != $'\t'* ]] || { echo "$line"; continue; }
  done=$((done + 1))
  [[ $line != FAIL* ]] || { echo "$line"; continue; }
  echo "[$done of $all, $SECONDS s, $((SECONDS * (all - done) / done)) s to go] $line"
done || failed=1
for program in step-*-each-arrives; do
  [[ " ${tools[*]} " != *" racecheck "* ]] || [ ! -x "$program" ] ||
    echo "left out: racecheck of ${program%-each-arrives}, which reports hazards that are none (chapter 39);" \
      "it ran on $program"
done
exit $failed

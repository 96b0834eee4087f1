#!/usr/bin/env bash
# make check-gpu: check-gpu.sh TESTS NN...: the steps on the GPU, then under each tool of
# compute-sanitizer, the newest first, and before them the kernel that takes every problem. The tools
# spend most of their time on the host: several at once. SANITIZE names the tools; empty, none.
set -euo pipefail
tests=$1
shift
STEPS_DEVICE=gpu "$tests" --test-suite=steps
command -v compute-sanitizer >/dev/null || { echo "SKIP: compute-sanitizer is not installed"; exit; }
mkdir -p build/check-gpu
export tests STEPS_DEVICE=gpu

one() { # TOOL NN, or TOOL any-problem
  local begin=$SECONDS log="build/check-gpu/$1-$2.log" cases='every step is right*'
  [ "$2" != any-problem ] || cases='every problem is posed*'
  STEPS_PREFIX="compute-sanitizer --tool $1 --error-exitcode 9" STEPS_ONLY=$2 \
    "$tests" --test-case="$cases" >"$log" 2>&1 ||
    { cat "$log"; echo "compute-sanitizer --tool $1, $2: FAILED"; return 1; }
  grep '^SKIP' "$log" | sort -u || true
  echo "compute-sanitizer --tool $1, $2: clean, $((SECONDS - begin)) s"
}
export -f one
jobs=$(getconf _NPROCESSORS_ONLN)
for what in any-problem $(printf '%s\n' "$@" | sort -r); do
  for tool in ${SANITIZE-memcheck racecheck initcheck synccheck}; do echo "$tool $what"; done
done | xargs -r -P $((jobs < 16 ? jobs : 16)) -L 1 bash -c 'one $0 $1'

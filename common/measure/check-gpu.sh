#!/usr/bin/env bash
# make check-gpu: check-gpu.sh TESTS NN...: the steps on the GPU, then under each tool of
# compute-sanitizer. The tools spend most of their time on the host: several steps at once. SANITIZE
# names the tools; empty, none.
set -euo pipefail
tests=$1
shift
STEPS_DEVICE=gpu "$tests" --test-suite=steps
command -v compute-sanitizer >/dev/null || { echo "SKIP: compute-sanitizer is not installed"; exit; }
mkdir -p build/check-gpu
export tests STEPS_DEVICE=gpu

one() { # TOOL NN
  local begin=$SECONDS log="build/check-gpu/$1-$2.log"
  STEPS_PREFIX="compute-sanitizer --tool $1 --error-exitcode 9" STEPS_ONLY=$2 \
    "$tests" --test-case='every step is right*' >"$log" 2>&1 ||
    { cat "$log"; echo "compute-sanitizer --tool $1, step $2: FAILED"; return 1; }
  grep '^SKIP' "$log" | sort -u || true
  echo "compute-sanitizer --tool $1, step $2: clean, $((SECONDS - begin)) s"
}
export -f one
jobs=$(getconf _NPROCESSORS_ONLN)
for tool in ${SANITIZE-memcheck racecheck initcheck synccheck}; do
  printf "$tool %s\n" "$@"
done | xargs -r -P $((jobs < 8 ? jobs : 8)) -L 1 bash -c 'one $0 $1'

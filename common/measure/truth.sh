#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make truth: truth.sh FILE...: the emulator's counts against ncu's, in the committed results of every GPU or
# of this one, or in a file that has both. Exit status 1 if they differ where truth.awk has no explanation and
# truth.open does not have this difference, 2 if there is nothing to compare.
set -euo pipefail
status=0 compared=
for file; do
  grep -q ',ncu,.*"shared load requests"' "$file" 2>/dev/null || continue
  echo "$file"
  compared=yes
  {
    sed -n 's/^[0-9]/open &/p' common/measure/truth.open
    for source in steps/*/attention.cu; do
      sed -nE "s/^constexpr int (Br|Bc|rows|warps|num_warps) = ([0-9]+)[,;].*/tile $(basename "$(dirname "$source")") \1 \2/p" "$source"
    done | sed 's/ num_warps / warps /'
  } | awk -f common/measure/truth.awk - $([[ $file != plots/results/* ]] || echo plots/results/emulator-counters.csv) "$file" || status=1
done
[ "$compared" ] || {
  echo "make truth: $*: no counts of both the emulator and ncu; make counters measures them" >&2
  exit 2
}
exit $status

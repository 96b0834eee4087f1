#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make truth: truth.sh FILE...: the emulator's counts against ncu's, in the committed results of every GPU or
# of this one, or in a file that has both. With ALL=1 every count. Exit status 1 if they differ where truth.awk has
# no explanation and truth.open does not have this difference, 2 if there is nothing to compare.
set -euo pipefail
status=0 compared=
tiling='Tiling{128, 64, 4, 2}'  # at head dims up to 128; at 192, too, Br is 128 and Bc is 64
for step in 29-types-and-dims 50-in-a-model; do
  grep -qF "$tiling" steps/$step/*.{cu,h} 2>/dev/null || {
    echo "make truth: step $step has no '$tiling'" >&2
    exit 2
  }
  tiles+="tile $step Br 128"$'\n'"tile $step Bc 64"$'\n'
done
for file; do
  head -1 "$file" 2>/dev/null | grep -q '"shared load requests"' && grep -qE "${ALL:+,emulator,|},ncu," "$file" ||
    continue
  echo "$file"
  compared=yes
  {
    sed -n 's/^[0-9]/open &/p' common/measure/truth.open
    echo "$tiles"
    for source in steps/*/attention.cu; do
      sed -nE "s/^constexpr int (Br|Bc|rows|warps|num_warps) = ([0-9]+)[,;].*/tile $(basename "$(dirname "$source")") \1 \2/p" "$source"
    done | sed 's/ num_warps / warps /'
    sed -n 's/^constexpr int rows = \([0-9]*\);.*/tile 50-in-a-model rows \1/p' steps/50-in-a-model/decode.h
  } | awk -f common/measure/truth.awk -v all="${ALL:-}" - \
    $([[ $file != plots/results/* ]] || echo plots/results/emulator-counters.csv) "$file" || status=$?
done
[ "$compared" ] || {
  echo "make truth: $*: no counts of both the emulator and ncu; make counters measures them" >&2
  exit 2
}
exit $status

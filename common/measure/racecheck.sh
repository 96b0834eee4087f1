#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make racecheck: what compute-sanitizer's racecheck reports of steps/39-tile-counter/racecheck.cu, in each of its
# modes, right and wrong: hazards, and how many of its numbers came out wrong.
set -euo pipefail
. common/measure/shell.sh
need_gpu
[ -x "$BUILD/bin/racecheck" ] || { echo "make racecheck: ARCH is $ARCH; mbarriers need sm_90" >&2; exit 2; }
csv=build/racecheck.csv
echo name,value,unit >"$csv"
for mode in each-arrives each-arrives-early one-arrives without-barrier bulk-copy bulk-copy-early; do
  said=$(compute-sanitizer --tool racecheck --racecheck-report hazard "$BUILD/bin/racecheck" $mode)
  hazards=$(sed -nE 's/.*RACECHECK SUMMARY: .*\(([0-9]+) errors?,.*/\1/p' <<<"$said")
  wrong=$(sed -nE "s/^$mode: no error, ([0-9]+) of ([0-9]+) wrong$/\1/p" <<<"$said")
  [ -n "$hazards" ] && [ -n "$wrong" ] || { echo "$said"; exit 1; }
  printf '%s,%s,hazards\n%s-wrong,%s,numbers\n' $mode "$hazards" $mode "$wrong" >>"$csv"
  echo "$mode: $hazards hazards, $wrong numbers wrong"
done
finish racecheck

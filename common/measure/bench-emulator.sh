#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# Times the emulator: each step checking only, and counting.
set -euo pipefail
for n; do
  for mode in --check-only ""; do
    begin=$(date +%s.%N)
    ./step-"$n" --device cpu --batch 1 --heads 2 --seqlen 512 --head-dim 64 $mode >/dev/null
    echo "step-$n ${mode:-counting} $begin $(date +%s.%N)"
  done
done | awk '{ t = $4 - $3; printf "%s  %-13s %6.2f s", $1, $2, t
  if ($2 == "counting") printf "  %5.1f times as long", t / last
  last = t; printf "\n"; fflush() }'

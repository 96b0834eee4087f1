#!/usr/bin/env bash
# make truth: truth.sh GPU: the emulator's counts against ncu's, in the committed results of every
# GPU, or of this one. Exit status 1 if they differ where truth.awk has no explanation and truth.open
# does not have this difference, 2 if there is nothing to compare.
set -euo pipefail
files=(plots/results/${1:-*}-counters.csv)
status=0 compared=
for file in "${files[@]}"; do
  grep -q ',ncu,' "$file" 2>/dev/null && grep -q ',emulator,' "$file" || continue
  echo "$file"
  compared=yes
  # For what is explained: the tiles of each step and its warps, and the line that stores a part.
  {
    sed -n 's/^[0-9]/open &/p' common/measure/truth.open
    for source in steps/*/attention.cu; do
      sed -nE "s/^constexpr int (Br|Bc|rows|warps|num_warps) = ([0-9]+)[,;].*/tile $(basename "$(dirname "$source")") \1 \2/p" "$source"
    done | sed 's/ num_warps / warps /'
    sed -n '/store<4>(parts(row, col)/=' common/kernel/parts.h | sed 's/^/line 26-split-kv store_part /'
    sed -n '/store<8>(smem.Q(row, col), left)/=' steps/29-in-a-model/decode.h |
      sed 's/^/line 29-in-a-model store_rotated_1 /'
    sed -n '/store<8>(tile(i, col), left)/=' steps/29-in-a-model/tiles.h |
      sed 's/^/line 29-in-a-model store_rotated_2 /'
  } | awk -f common/measure/truth.awk - "$file" || status=1
done
[ "$compared" ] || {
  echo "make truth: ${files[*]}: no counts of both the emulator and ncu; make counters measures them" >&2
  exit 2
}
exit $status

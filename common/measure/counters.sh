#!/usr/bin/env bash
# make counters: counters.sh STEP...: what the emulator counts and, with a GPU and ncu, what ncu
# measures at the same shapes; and, at a large shape, the HBM traffic and why warps wait. The
# emulator's counts are the same on every machine: without a GPU they become the emulator's part of
# every GPU's counters, too.
set -euo pipefail
. common/measure/shell.sh

# Both head dims, several heads and batches, and an odd number of tiles of Q, and of K for tiles of
# 128: whoever wrote a kernel had other shapes in mind.
small=("batch=1 heads=2 seqlen=512 head-dim=128" "batch=1 heads=3 seqlen=384 head-dim=64"
  "batch=2 heads=1 seqlen=640 head-dim=128")
# Scores and outputs far larger than the L2 cache.
large="batch=4 heads=16 seqlen=4096 head-dim=128"

rm -f build/counted.csv
for step; do
  for shape in "${small[@]}"; do
    status=0
    ./step-"$(number_of "$step")" --device cpu $(options "$shape") --profile-csv build/counted.csv \
      >build/step.txt || status=$?
    case $status in
      0) head -3 build/step.txt ;;
      2) echo "left out: $step at $shape" ;;
      *) cat build/step.txt; exit $status ;;
    esac
  done
done
mv build/counted.csv "$results/emulator-counters.csv"
header=$(head -1 "$results/emulator-counters.csv")

# The bank maps are drawn from these.
rm -f "$results"/trace-*.csv
for step; do
  case $step in
    02-* | 03-*) shape= ;;
    05-* | 06-*) shape="--head-dim 128" ;;
    *) continue ;;
  esac
  ./step-"$(number_of "$step")" --device cpu $shape --trace-csv "$results/trace-$step.csv" >/dev/null
done

if [ -z "$GPU" ] || [ -z "$NVCC" ] || ! command -v ncu >/dev/null; then
  echo "SKIP: no GPU, nvcc or ncu to measure with; the emulator's counts: $results/emulator-counters.csv"
  for file in $(grep -l ',emulator,' "$results"/*-counters.csv); do
    [ "$file" != "$results/emulator-counters.csv" ] || continue
    { cat "$results/emulator-counters.csv"; grep ',ncu,' "$file"; } >build/counters.csv
    mv build/counters.csv "$file"
  done
  exit
fi

# metrics KIND: those of ncu.awk's table, with commas
metrics() { sed -nE "s/^ *$1\[\"([^\"]+)\"\].*/\1/p" common/measure/ncu.awk | paste -sd,; }
# What the emulator counts: the third field between quotes in its table.
counted=$(awk -F'"' '/^COUNTER\(/ { print $4 }' common/emulator/counters.def | tr ' ' '\n' | grep . |
  sort -u | paste -sd,)

# measure FILE METRICS SHAPE: appends what ncu measures of each step in turn
measure() {
  local step
  for step in "${steps[@]}"; do
    echo "ncu $step $3"
    local status=0
    ncu --clock-control none --metrics "$2" --csv ./step-"$(number_of "$step")" --device gpu \
      --check-only $(options "$3") >build/ncu.txt || status=$?
    if [ $status != 0 ]; then
      tail -3 build/ncu.txt
      grep -q 'is allowed' build/ncu.txt || exit 1
      continue
    fi
    awk -f common/measure/ncu.awk -v step="$step" -v shape="$(tr ' ' '\n' <<<"$3" | sed 's/.*=//' |
      paste -sd,)" common/emulator/counters.def build/ncu.txt | sort >>"build/$1.csv"
  done
}
steps=("$@")
cp "$results/emulator-counters.csv" build/counters.csv
echo "$header" | tee build/hbm-counters.csv >build/stalls-counters.csv
for shape in "${small[@]}"; do measure counters "$counted,$(metrics count)" "$shape"; done
measure hbm-counters "$(metrics traffic)" "$large"
measure stalls-counters "$(metrics stall)" "$large"
finish counters hbm-counters stalls-counters
common/measure/truth.sh "$GPU"

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench-models: bench-models.sh STEP...: the problems of Part III, each with the steps that take it
# and their peers one after the other, into plots/results/GPU-models.csv. The headline problems are
# measured in REPEAT rounds (default 2), the first before all others and the rest after them. The rows
# are in build/models.csv as they come, the most important first.
set -euo pipefail
. common/measure/shell.sh
need_gpu
begin_rows build/models.csv "$@"
repeat=${REPEAT:-2}

start_peers

# BATCH SEQLEN [HEADS [HEAD_DIM]]. Where 2% matter, a launch takes 10 ms: 20 launches of 5 ms end while
# the power limit takes hold, and differ by 5% from one run to the next.
at() { echo "--batch $1 --heads ${3:-16} --seqlen $2 --head-dim ${4:-128}"; }
# decode BATCH KEYS: one query of 64 heads on 8 of a cache
decode() { echo "$(at "$1" 1 64) --kv-heads 8 --seqlen-k $2"; }

round() {
  local shape n
  problem "20 21 22 23 50" --causal $(at 16 8192)
  problem "23 25 26 27 50" $(decode 1 131072)
  for shape in "4 65536" "64 4096" "16 65536"; do problem "27 50" $(decode $shape); done
  for n in 512 1024; do problem "20 22 50" --causal $(at 16 $n); done
  # Lengths: 8192 fits all tiles, the others none.
  for n in 8191 8193; do
    problem "21 50" --causal $(at 16 $n)
    problem "21 50" $(at 8 $n)
  done
}

once() {
  local n shape window layout
  # What each generality costs a problem that does not need it.
  problem "16 20 21 22 23 29 50" $(at 8 8192)
  # Decoding: the short caches. Those of up to 12k keys in all (4 KB a key: 50 MB) are read from the L2
  # cache.
  for shape in "1 1024" "1 4096" "1 16384" "1 32768" "1 65536" "16 1024" "16 4096" "16 16384"; do
    problem "23 25 26 27 50" $(decode $shape)
  done
  # What a model calls for each token: pages, new keys, a rotation.
  for shape in "1 1024" "1 16384" "16 16384"; do
    problem "26 27 50" --page-size 16 $(decode $shape)
    problem "26 27 50" --append 1 $(decode $shape)
    problem "26 27 50" --page-size 16 --append 1 $(decode $shape)
    problem "50" --page-size 16 --append 1 --rope halves $(decode $shape)
  done
  # A few queries of a long cache.
  for n in 16 17 32 64 128; do problem "27 50" --causal --kv-heads 8 --seqlen-k 131072 $(at 1 $n 64); done
  for shape in "4 16384" "64 1024" "256 1024"; do problem "27 50" $(decode $shape); done
  problem "20 22 50" --causal $(at 16 2048)
  for n in 16 64; do problem "20 50" --causal $(at $n 4096); done
  problem "20 50" --causal $(at 8 16384)
  problem "20 50" --causal $(at 16 8192 16 64)
  # Grouped heads beside as many that share nothing.
  problem "23 50" --kv-heads 8 $(at 4 8192 64)
  problem "23" $(at 4 8192 64)
  problem "23 50" --kv-heads 1 --causal $(at 16 8192)
  for n in halves neighbours; do problem "24 50" --rope $n --causal $(at 16 8192); done
  problem "28 50" --causal $(at 2 16384)
  for window in 256 1024 4096 8192; do problem "28 50" --window $window $(at 2 16384); done
  problem "28 50" --window 1024 --sinks 4 $(at 2 16384)
  for n in 4 8; do problem "29 50" --type bf16 $(at $n 8192); done
  for n in 32 64 80 96 192 256; do problem "29" --type bf16 $(at 4 8192 16 $n); done
  for n in 256 192 96 80 64 32; do problem "29 50" $(at 4 8192 16 $n); done
  for layout in bnhd interleaved; do problem "22 50" --layout $layout --causal $(at 16 8192); done
  # Half of the rows that four full sequences have.
  problem "22 50" --layout packed --causal --lengths 8192,4096,3000,1096 $(at 4 8192)
}

round
once
for ((i = 2; i <= repeat; i++)); do round; done
end_peers
end_rows
finish models
echo "measured in $SECONDS s; 'make plot' draws it"

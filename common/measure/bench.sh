#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench: bench.sh STEP...: every step of the plain problem and its peers, into
# plots/results/GPU.csv. REPEAT rounds (default 3) of the steps and their peers follow each other: a GPU
# that grows warm or slow does so for all. The last step is where the book has come to.
set -euo pipefail
. common/measure/shell.sh
need_gpu
plain=()
for step; do ! is_plain "$step" || plain+=("$step"); done
begin_rows build/bench.csv "${plain[@]}"
last=${steps[-1]}
repeat=${REPEAT:-3}
peers=plain
start_peers
shape=$(describe "$last" gpu)                           # what is measured where nothing is said
batch=$(value "$shape" batch) heads=$(value "$shape" heads) # a batch and heads that fill the chip

# A launch of these at the default shape takes seconds: one round is enough.
slow="00 01 02"
# And these have their curves measured at batch 1.
batch_1="00 02 03"

round() {
  for n in "${steps[@]}"; do
    [ "$1" = 1 ] || ! among "$n" "$slow" || continue
    step "$n"
  done
  ask_peers
  ask_peers matmul
}

# Step 01 has a block per head, the others one per tile of a head. From one head on: how many heads
# take the time of one, and how many fill the chip. At seqlen 2048, where step 01 takes a third of a
# second; at 8192 it is measured at the batch that fills the chip, in the rounds, and here at 1.
parallelism() {
  local n b h
  step 01 --batch 1
  for n in 01 02; do
    for h in 1 4; do step $n --seqlen 2048 --batch 1 --heads $h; done
    for b in 1 2 4 8 16; do step $n --seqlen 2048 --batch $b --heads 16; done
  done
}

# The curves over the sequence length. 8192 is in the rounds, at head dim 128.
curves() {
  local seqlen n
  # Short sequences: every step.
  for seqlen in 512 1024; do
    problem "${steps[*]}" --seqlen $seqlen --batch "$batch"
  done
  for seqlen in 512 1024 2048 4096 16384; do
    for n in $batch_1; do step "$n" --seqlen $seqlen --batch 1; done
    [ $seqlen -ge 2048 ] || continue
    problem "$(printf '%s\n' 04 07 10 "$last" | sort -u)" \
      --seqlen $seqlen --batch $((seqlen > 8192 ? batch / 2 : batch))
  done
  for seqlen in 1024 2048 4096 8192 16384; do
    problem "$(printf '%s\n' 04 "$last" | sort -u)" \
      --head-dim 64 --seqlen $seqlen --batch $((seqlen > 8192 ? batch / 2 : batch))
  done
}

for ((i = 1; i <= repeat; i++)); do
  echo "round $i of $repeat"
  round $i
done
echo "heads in parallel"
parallelism
echo "sequence lengths"
curves
end_peers
end_rows
{
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem,power.limit --format=csv
  "$NVCC" --version | tail -2
  "$PYTHON" -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null || true
} >"$results/$GPU.txt"
mv "$csv" "$results/$GPU.csv"
echo "measured in $SECONDS s; written: $results/$GPU.csv; 'make plot' draws it"

#!/usr/bin/env bash
# What `make bench` measures: common/measure/bench.sh FILE.csv REPEAT STEP...
# Appends rows to FILE.csv. STEP is a number; the last is where the book has come to. REPEAT rounds
# of the steps and their peers follow each other: a GPU that grows warm or slow does so for all.
set -euo pipefail
csv=$1 repeat=$2
shift 2
steps=("$@") last=${!#}
left_out=()

# Seconds a launch at the default shape: one round is enough. These and step 03, whose variants are
# as slow, have their variants and curves measured at batch 1.
slow="00 01 02"
batch_1="00 01 02 03"

among() { [[ " $2 " == *" $1 "* ]]; }

# step NN OPTIONS...: one row. The programs say in a line what a GPU is too small for.
step() {
  among "$1" "${steps[*]}" || return 0
  local status=0
  ./step-"$@" --csv "$csv" </dev/null || status=$?
  case $status in
    0) ;;
    2 | 3) left_out+=("step-$*") ;;
    *) exit "$status" ;;
  esac
}

peers() { ${PYTHON:-python3} common/measure/peers.py --csv "$csv" "$@" || true; } # it says why it cannot

# variants NN: "--option value" of each variant in the step's --help, the default one first.
variants() {
  ./step-"$1" --help | sed -nE '/^  --inputs/d; s/^  (--[a-z-]+) [A-Z]+ +([a-z0-9|-]+)$/\1 \2/p' |
    while read -r option values; do
      for value in ${values//|/ }; do echo "$option $value"; done
    done
}

round() {
  for n in "${steps[@]}"; do
    [ "$1" = 1 ] || ! among "$n" "$slow" || continue
    step "$n"
    local default=yes
    while read -r option value; do
      if among "$n" "$batch_1"; then
        [ "$1" != 1 ] || step "$n" "$option" "$value" --batch 1
      else
        [ $default = yes ] || step "$n" "$option" "$value"
      fi
      default=no
    done < <(variants "$n")
  done
  peers --matmul
}

# The curves over the sequence length. 8192 is in the rounds, at head dim 128.
curves() {
  local seqlen batch n
  for seqlen in 512 1024 2048 4096 16384; do
    batch=$((seqlen > 8192 ? 8 : 16))
    for n in 00 02 03; do step $n --seqlen $seqlen --batch 1; done
    for n in $(printf '%s\n' 04 07 10 "$last" | sort -u); do
      step "$n" --seqlen $seqlen --batch $batch
    done
  done
  peers --seqlen 512 1024 2048 4096
  peers --seqlen 16384 --batch 8
  for seqlen in 1024 2048 4096 8192 16384; do
    batch=$((seqlen > 8192 ? 8 : 16))
    for n in $(printf '%s\n' 04 "$last" | sort -u); do
      step "$n" --head-dim 64 --seqlen $seqlen --batch $batch
    done
  done
  peers --head-dim 64 --seqlen 1024 2048 4096 8192
  peers --head-dim 64 --seqlen 16384 --batch 8
}

for ((i = 1; i <= repeat; i++)); do
  echo "round $i of $repeat"
  round $i
done
echo "sequence lengths"
curves
for run in "${left_out[@]}"; do echo "left out: $run"; done
echo "measured in $SECONDS s"

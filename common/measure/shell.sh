# SPDX-License-Identifier: MIT
# What the scripts that measure share. From the Makefile: GPU, the name of this machine's results
# (empty: no GPU), NVCC, PYTHON and BUILD.
results=plots/results

# The command that was typed, for messages.
command="make ${0##*/}"
command=${command%.sh}

# Ends the script where there is nothing to measure with.
need_gpu() {
  [ -n "$GPU" ] || { echo "$command: no GPU here" >&2; exit 3; }
  need_nvcc
}
need_nvcc() {
  [ -n "$NVCC" ] || { echo "$command: nvcc is not on the PATH" >&2; exit 3; }
}

# build TARGET...: for a GPU only where the make that runs this script builds for one.
build() { make -s $([ -n "${FOR_GPU-}" ] || echo NVCC=) "$@"; }

# describe NN KEY: what ./step-NN --describe says after this key.
describe() { ./step-"$1" --describe | sed -n "s/^$2 //p"; }

# header NN COLUMN: what step NN's header says, as build/ladder.csv has it.
header() {
  awk -F'"' -v step="$1-" -v column="$2" '
    NR == 1 { for (i = 2; i <= NF; i += 2) if ($i == column) at = i }
    index($2, step) == 1 { print $at }' build/ladder.csv
}

# value "batch=16 head-dim=128" head-dim: 128
value() { tr ' ' '\n' <<<"$1" | sed -n "s/^$2=//p"; }

# is_plain STEP: whether this step takes no more than the plain problem, if in several types, as those
# of Parts I and II and most of Part IV.
is_plain() { [[ $(header "$(number_of "$1")" takes) =~ ^(--type)?$ ]]; }

number_of() { echo "${1%%-*}"; } # 15-early-k: 15

# source_of NN: this step's source. Ends the script where there is no such step.
source_of() {
  ls steps/"$1"-*/attention.cu 2>/dev/null || {
    echo "$command: no such step; there are" \
      "$(ls steps | sed -nE 's/^([0-9]+)-.*/\1/p' | paste -sd' ')" >&2
    exit 2
  }
}

among() { [[ " $2 " == *" $1 "* ]]; }

# begin_rows FILE STEP...: what step measures goes to this new file, if it is one of these.
begin_rows() {
  csv=$1 steps=() left_out=() failed=()
  rm -f "$csv"
  local step
  for step in "${@:2}"; do steps+=("$(number_of "$step")"); done
}

# step NN OPTIONS...: one row. The programs say in a line what they or this GPU do not take.
step() {
  among "$1" "${steps[*]}" || return 0
  local status=0
  ./step-"$@" --csv "$csv" </dev/null || status=$?
  case $status in
    0) ;;
    2 | 3) left_out+=("step-$*") ;;
    *) failed+=("step-$*") ;;
  esac
}

# Says what step left out. Ends the script if a step failed: its rows stay where they are.
end_rows() {
  local run
  for run in "${left_out[@]}"; do echo "left out: $run"; done
  for run in "${failed[@]}"; do echo "FAILED: $run" >&2; done
  [ ${#failed[@]} = 0 ] || exit 1
}

# start_peers: the peers wait in a process of their own, which imports PyTorch once. Without PyTorch it
# ends, and asking it fails; bash itself is not to end of that.
start_peers() {
  trap '' PIPE
  coproc PEERS { "$PYTHON" common/measure/peers.py --csv "$csv" --clocks "$BUILD/sm_clock.so"; }
  exec {ask}>&"${PEERS[1]}" {answer}<&"${PEERS[0]}"
}

# ask_peers [matmul]: measures them at the problem of the last row, or a matrix product. Where peers=plain,
# the peers of the plain problem.
ask_peers() { { echo "${1:-${peers:-}}" >&"$ask"; } 2>/dev/null && read -r <&"$answer" || true; }

end_peers() { exec {ask}>&-; }

rows() { [ ! -e "$csv" ] || wc -l <"$csv"; }

# problem "NN..." OPTIONS...: these steps, and the peers where a step has measured the problem.
problem() {
  local n before
  before=$(rows)
  for n in $1; do step "$n" "${@:2}"; done
  [ "$(rows)" = "$before" ] || ask_peers
}

# finish NAME...: build/NAME.csv has been measured to the end and becomes this GPU's result.
finish() {
  local name
  for name; do
    mv "build/$name.csv" "$results/$GPU-$name.csv"
    echo "written: $results/$GPU-$name.csv"
  done
}

# problems_of NN: sets checked, small problems for the answer of step NN and its variants, each with also_checked
# added, and measured, those that it is timed at: first its headline. A program that does not take one says so and is
# left out: a variant may take one head dim only or need more shared memory than there is, and the step before takes
# less.
problems_of() {
  checked=("--batch 1 --heads 2 --seqlen 512 --head-dim 64" "--batch 1 --heads 2 --seqlen 512 --head-dim 128")
  measured=("")
  also_checked=
  decode="--heads 64 --kv-heads 8 --seqlen 1 --head-dim 128"
  case $1 in
    00 | 02 | 03) measured=("--batch 1") ;; # a launch at the default shape takes seconds
    16) measured=("" "--seqlen 1024") ;;
    20) also_checked=--causal measured=("--causal" "--causal --batch 1 --seqlen 4096") ;;
    21) also_checked=--causal measured=("--causal" "--batch 8" "--causal --seqlen 8191") ;;
    22) also_checked=--causal measured=("--causal --batch 8" "--causal --batch 8 --layout "{bnhd,bnhd-32,bnhd-128} "--causal --seqlen 1024") ;;
    23) also_checked="--kv-heads 1" measured=("--batch 4 --heads 64 --kv-heads 8" "--batch 4 --heads 64" "--causal --batch 8") ;;
    24) also_checked="--rope halves" measured=("--causal --batch 8 --rope halves" "--causal --seqlen 512 --rope halves") ;;
    25 | 26 | 27)
      checked=("--batch 2 --heads 8 --kv-heads 1 --seqlen 1 --seqlen-k 515 --head-dim 64"
        "--batch 1 --heads 8 --kv-heads 2 --seqlen 1 --seqlen-k 1030 --head-dim 128")
      measured=()
      for shape in "1 1024" "1 4096" "1 16384" "1 65536" "1 131072" "16 1024" "16 4096" "16 16384" "64 1024" "64 4096"; do
        read -r batch keys <<<"$shape"
        measured+=("--batch $batch --seqlen-k $keys $decode")
      done
      ;;
    28)
      also_checked="--window 100"
      measured=("--batch 2 --seqlen 16384 --window 1024" "--batch 2 --seqlen 16384 --window 256")
      ;;
    29)
      checked=("--batch 1 --heads 2 --seqlen 500 --head-dim "{64,192,256})
      measured=("--batch 4 --head-dim "{64,192,256})
      ;;
    63 | 64) measured=("--type bf16 --batch 4" "--type bf16 --batch 4 --head-dim 64") ;;
    50)
      also_checked=--causal
      checked+=("--batch 1 --heads 8 --kv-heads 2 --seqlen 20 --seqlen-k 515 --head-dim 64")
      measured=("--causal --batch 8")
      # Which kernel a few queries want, of a long cache and of a short one.
      decode="--causal --heads 64 --kv-heads 8 --head-dim 128"
      for shape in "1 131072 "{17,32,64,128} "4 32768 "{17,32,64} "16 4096 "{17,32}; do
        read -r batch keys queries <<<"$shape"
        measured+=("--batch $batch --seqlen $queries --seqlen-k $keys $decode")
      done
      ;;
    36) measured=("" "--seqlen 1024" "--head-dim 64") ;;
    39) also_checked=--causal measured=("--causal" "--causal --seqlen 1024" "--head-dim 64" "--causal --head-dim 64") ;;
    38) also_checked=--causal measured=("--causal" "--causal --seqlen 1024") ;;
    42) also_checked=--causal measured=("--causal --head-dim 64 --seqlen 1024" "--causal --head-dim 64" "--head-dim 64") ;;
    65) also_checked=--causal measured=("--type bf16 --batch 4 --causal" "--type bf16 --batch 4 --causal --head-dim 64" "--type bf16 --batch 4") ;;
    51) also_checked=--causal measured=("--type bf16 --seqlen 1024" "--type bf16 --causal --seqlen 1024 --head-dim 64" "--type bf16") ;;
    52)
      also_checked="--softcap 30 --alibi --sink-logits"
      measured=("--type bf16 --softcap 30" "--type bf16 --softcap 30 --head-dim 64" "--type bf16 --alibi" "--type bf16 --alibi --head-dim 64")
      ;;
    56)
      checked=("--batch 1 --heads 2 --seqlen 512 --head-dim "{96,256})
      measured=("--type bf16 --batch 4 --head-dim "{96,256,128}{,\ --causal} "--type bf16 --batch 4 --head-dim 64")
      ;;
    83)
      checked=("--batch 2 --seqlen-k 515" "--batch 1 --heads 16 --seqlen 2 --seqlen-k 1030 --causal --page-size 24")
      measured=("--type bf16 --batch 64 --seqlen-k 4096"{,\ --page-size\ {64,16,8}})
      ;;
    58 | 82 | 84)
      checked=("--batch 2 --seqlen-k 515" "--batch 1 --heads 16 --seqlen 2 --seqlen-k 1030 --causal --splits 3")
      measured=("--type bf16 --batch "{"64 --seqlen-k 4096","16 --seqlen-k 4096",1})
      ;;
    66 | 67 | 68 | 80 | 88)
      also_checked=--causal
      measured=("--type bf16 --batch 4" "--type bf16 --batch 4 --head-dim 64" "--type bf16 --batch 4 --causal")
      ;;
    90) also_checked=--causal measured=("--type bf16 --causal --seqlen 1024"{,\ --head-dim\ 64} "--type bf16 --causal --seqlen 4096") ;;
    91)
      also_checked=--causal checked+=("--batch 1 --heads 2 --seqlen 512 --head-dim 96")
      measured=("--type bf16 --head-dim 96 --causal --seqlen "{1024,4096} "--type bf16 --seqlen 4096"{,\ --head-dim\ 96})
      ;;
    92)
      also_checked=--causal
      measured=("--type bf16 --causal --seqlen "{1024,4096}{,\ --head-dim\ 64} "--type bf16 --seqlen 1024" "--type bf16 --batch 4 --seqlen 8192"{,\ --causal})
      ;;
    40) checked=("--batch 1 --heads 2 --seqlen 512") measured=("" "--causal" "--seqlen 512" "--causal --seqlen 1024") ;;
    41) checked=("--batch 1 --heads 2 --seqlen 512") measured=("" "--causal" "--seqlen 512" "--causal --seqlen 1024") ;;
  esac
}

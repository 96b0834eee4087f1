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
  coproc PEERS { "$PYTHON" common/measure/peers.py --csv "$csv"; }
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

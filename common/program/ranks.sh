#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# ranks.sh N PROGRAM [OPTION...]: runs a step of Part VII as N processes of this machine, with a GPU each. If one fails,
# or if this script is interrupted, the others end, too: they would wait for its messages.
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || {
  echo "usage: ranks.sh N PROGRAM [OPTION...], as: ranks.sh 2 ./step-71 --causal" >&2
  exit 2
}
ranks=$1
shift
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
if [[ $gpus -gt 0 && $gpus -lt $ranks ]]; then # NCCL refuses two ranks on one GPU
  echo "ranks.sh: $ranks ranks need $ranks GPUs, and this machine has $gpus;" \
    "$1 --device cpu --gpus $ranks runs on the emulator" >&2
  exit 3
fi
id=$(mktemp -u)
trap 'kill $(jobs -pr) 2>/dev/null && wait || true; rm -f "$id" "$id.part" "$id.failed"' EXIT
trap 'exit 130' INT # which what runs in the background of a script ignores
trap 'exit 143' TERM
for ((rank = 0; rank < ranks; rank++)); do "$@" --gpus "$ranks" --rank "$rank:$id" & done
for ((rank = 0; rank < ranks; rank++)); do wait -n || exit; done

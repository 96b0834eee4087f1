#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make bench-decode: bench-decode.sh STEP...: one query per head and a long cache, steps that decode and their peers
# one after the other, into plots/results/GPU-decode.csv. The rows are in build/decode.csv as they come.
set -euo pipefail
. common/measure/shell.sh
need_gpu
begin_rows build/decode.csv "$@"
start_peers

# decode "NN..." HEADS KV_HEADS BATCHxKEYS...
decode() {
  local shape
  for shape in "${@:4}"; do
    problem "$1" --batch "${shape%x*}" --heads "$2" --kv-heads "$3" --seqlen 1 --seqlen-k "${shape#*x}" --head-dim 128
  done
}

# Batches that fill a GPU's waves and batches that do not. A large cache's inputs take the host seconds to draw, so
# fewer steps go there.
decode "27 50 55 59" 64 8 1x1024 1x4096 1x16384 3x4096 5x1024 16x1024 16x4096 64x1024 2x9000
decode "27 50 55 59" 8 1 1x32768 16x16384
decode "55 59" 64 8 12x9000 3x16384 100x1024 32x4096
decode "55 59" 32 32 4x4096
decode "55 59" 28 4 5x9000
decode "55 59" 128 8 7x4096
decode "59" 64 8 256x1024 5x40000 7x40000 1x131072 64x4096 16x16384
end_peers
end_rows
finish decode
echo "measured in $SECONDS s"

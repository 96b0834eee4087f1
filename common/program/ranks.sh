#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# ranks.sh N PROGRAM [OPTION...]: runs a step of Part VII as N processes of this machine, with a GPU each. If one fails,
# the others end, too: they would wait for its messages.
set -euo pipefail
ranks=$1
shift
id=$(mktemp -u)
trap 'rm -f "$id" "$id.failed"' EXIT
for ((rank = 0; rank < ranks; rank++)); do "$@" --gpus "$ranks" --rank "$rank:$id" & done
for ((rank = 0; rank < ranks; rank++)); do
  wait -n && continue
  status=$?
  kill $(jobs -pr) 2>/dev/null || true
  exit $status
done

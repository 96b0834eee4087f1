#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make ceilings: what this GPU can do at most.
set -euo pipefail
. common/measure/shell.sh
need_gpu
[ -x "$BUILD/bin/ceilings" ] || { echo "$command: mma.m16n8k16 needs sm_80 or later" >&2; exit 3; }
"$BUILD/bin/ceilings" --csv build/ceilings.csv
finish ceilings

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make regs: registers, shared memory, occupancy and spills of every kernel of these steps, for ARCH. An
# error where ptxas serialises wgmma, or where a step from 30 on spills (regs.awk).
set -euo pipefail
. common/measure/shell.sh
need_nvcc
rm -rf build/regs
mkdir -p build/regs
for step; do
  arch=$(header "$(number_of "$step")" archs) arch=${arch%% *}
  "$NVCC" -std=c++20 -O3 -I. -arch="compute_${arch#sm_}" -DSTEP_NAME='""' -DSTEP_NEEDS='""' \
    -DSTEP_TAKES='""' -ptx "steps/$step/attention.cu" -o build/regs/ptx
  "${NVCC%nvcc}ptxas" -v -arch="$arch" build/regs/ptx -o build/regs/cubin >build/regs/log 2>&1 ||
    { cat build/regs/log; exit 1; }
  cat build/regs/ptx build/regs/log | c++filt -p >"build/regs/$step.txt"
done
awk -f common/measure/regs.awk -v arch="$ARCH" build/regs/*.txt

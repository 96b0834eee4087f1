#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make regs: registers, shared memory, occupancy and spills of every kernel of these steps, for ARCH. An
# error where ptxas serialises wgmma, or where a step from 30 on spills (regs.awk). CSV=FILE: writes the registers
# and the instructions of the longest loop, which nvdisasm shows, of each step and head dim.
set -euo pipefail
. common/measure/shell.sh
need_nvcc
nvdisasm=$(command -v nvdisasm || ls "${NVCC%nvcc}nvdisasm" 2>/dev/null || true)
[ -z "${CSV-}" ] || [ -n "$nvdisasm" ] ||
  { echo "make regs: CSV= needs nvdisasm of the CUDA toolkit on the PATH" >&2; exit 3; }
rm -rf build/regs
mkdir -p build/regs
for step; do
  arch=$(header "$(number_of "$step")" archs) arch=${arch%% *}
  "$NVCC" -std=c++20 -O3 -I. -arch="compute_${arch#sm_}" -DSTEP_NAME='""' -DSTEP_NEEDS='""' \
    -DSTEP_TAKES='""' -ptx "steps/$step/attention.cu" -o build/regs/ptx
  "${NVCC%nvcc}ptxas" -v -arch="$arch" build/regs/ptx -o build/regs/cubin >build/regs/log 2>&1 ||
    { cat build/regs/log; exit 1; }
  {
    cat build/regs/ptx build/regs/log
    [ -z "${CSV-}" ] || "$nvdisasm" -c build/regs/cubin | awk -f common/measure/sass.awk
  } | c++filt -p >"build/regs/$step.txt"
done
awk -f common/measure/regs.awk -v arch="$ARCH" -v csv="${CSV-}" build/regs/*.txt

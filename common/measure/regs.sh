#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make regs: registers, shared memory, occupancy and spills of every kernel of these steps, for ARCH. An
# error where ptxas serialises wgmma, or where a step from 30 on spills on Hopper (regs.awk). CSV=FILE: writes the
# registers and the instructions of the longest loop, which nvdisasm shows, of each step and head dim. WERROR=1:
# warnings are errors.
set -euo pipefail
. common/measure/shell.sh
need_nvcc
nvdisasm=$(command -v nvdisasm || ls "${NVCC%nvcc}nvdisasm" 2>/dev/null || true)
[ -z "${CSV-}" ] || [ -n "$nvdisasm" ] ||
  { echo "make regs: CSV= needs nvdisasm of the CUDA toolkit on the PATH" >&2; exit 3; }
rm -rf build/regs
mkdir -p build/regs
# compile STEP: what regs.awk reads of it
compile() {
  local arch to=build/regs/$1
  arch=$(header "$(number_of "$1")" archs) arch=${arch%% *}
  local -a nvcc=("$NVCC" -std=c++20 -I. '-DSTEP_NAME=""' '-DSTEP_NEEDS=""' '-DSTEP_TAKES=""')
  "${nvcc[@]}" ${WERROR:+-Werror all-warnings} -arch="compute_${arch#sm_}" -ptx "steps/$1/attention.cu" -o "$to.ptx"
  "${NVCC%nvcc}ptxas" -v -arch="$arch" "$to.ptx" -o "$to.cubin" >"$to.log" 2>&1 || { cat "$to.log"; exit 1; }
  {
    cat "$to.ptx" "$to.log"
    [ -z "${CSV-}" ] || "$nvdisasm" -c "$to.cubin" | awk -f common/measure/sass.awk
  } | c++filt -p >"$to.txt"
}
# On all cores.
for step; do
  compile "$step" &
  [ "$(jobs -rp | wc -l)" -lt "$(getconf _NPROCESSORS_ONLN)" ] || wait -n
done
while [ -n "$(jobs -p)" ]; do wait -n; done
awk -f common/measure/regs.awk -v arch="$ARCH" -v csv="${CSV-}" build/regs/*.txt

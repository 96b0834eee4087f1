#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make sass-NN: sass.sh NN: the machine code of a step for ARCH, into build/sass/, and what its loops
# hold.
set -euo pipefail
. common/measure/shell.sh
command="make sass-$1"
source=$(source_of "$1")
step=$(basename "$(dirname "$source")")
need_nvcc
nvdisasm=$(command -v nvdisasm || ls "${NVCC%nvcc}nvdisasm" 2>/dev/null) ||
  { echo "$command: nvdisasm of the CUDA toolkit is not on the PATH" >&2; exit 3; }
arch=$(header "$1" archs) arch=${arch%% *}
arch=${arch:-$(header "$1" needs)} # where ARCH is older
mkdir -p build/sass
"$NVCC" -std=c++20 -O3 -I. -arch="$arch" -DSTEP_NAME='""' -DSTEP_NEEDS='""' -DSTEP_TAKES='""' \
  -cubin "$source" -o "build/sass/$step.cubin"
"$nvdisasm" -c "build/sass/$step.cubin" >"build/sass/$step.txt"
awk -f common/measure/sass.awk "build/sass/$step.txt" | c++filt -p
echo "the whole of it, for $arch: build/sass/$step.txt"

#!/bin/sh
# without.sh STEP TEXT [OPTION...]: deletes the one line that contains TEXT from a copy of a step, builds it for the
# emulator, and runs it. The exit status is the program's.
set -e
[ $# -ge 2 ] || { echo "usage: without.sh STEP TEXT [OPTION...], such as: without.sh 02 'Q, K and V are there'" >&2; exit 2; }
step=$(basename "$(ls -d steps/"$1"-*)") text=$2 dir=build/without
lines=$(grep -cF -- "$text" "steps/$step/attention.cu" || :)
[ "$lines" = 1 ] || { echo "without.sh: $lines lines of steps/$step/attention.cu contain '$text', not one" >&2; exit 2; }
shift 2
mkdir -p $dir
grep -vF -- "$text" "steps/$step/attention.cu" >$dir/attention.cu
make --no-print-directory NVCC= emulator-objects >$dir/make.log 2>&1 || { tail -3 $dir/make.log; exit 2; }
objects=$(find build/cpu/common/program build/cpu/common/emulator build/cpu/reference -name '*.o' ! -name '*_test.o')
${CXX:-g++} -std=c++20 -O1 -w -I. -pthread -DSTEP_NAME="\"$step\"" -DSTEP_NEEDS='""' -DSTEP_TAKES='""' \
	-x c++ $dir/attention.cu -x none $objects -o $dir/step || exit 2
$dir/step --device cpu "$@"

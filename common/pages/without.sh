#!/bin/sh
# SPDX-License-Identifier: MIT
# without.sh NN TEXT [OPTION...]: deletes the one line that contains TEXT from a copy of step NN, builds
# that for the emulator as a variant would be, and runs it. The exit status is the program's. A name that only
# that line used is no error.
set -e
[ $# -ge 2 ] || { echo "usage: without.sh NN TEXT [OPTION...], as: without.sh 02 'Q, K and V are there'" >&2; exit 2; }
number=$1 text=$2 step=$(basename "$(ls -d steps/"$1"-*)")
shift 2
lines=$(grep -cF -- "$text" "steps/$step/attention.cu" || :)
[ "$lines" = 1 ] || { echo "without.sh: $lines lines of steps/$step/attention.cu contain '$text', not one" >&2; exit 2; }
name=without-$(echo "$text" | cksum | cut -d' ' -f1)  # of its own: the pages' are built at the same time
copy=build/variants/$step/$name program=build/cpu/bin/step-$number-$name
mkdir -p "$copy"
grep -vF -- "$text" "steps/$step/attention.cu" >"$copy/attention.cu"
make -s --no-print-directory NVCC= WERROR= "$program" >"$copy/make.log" 2>&1 || { tail -3 "$copy/make.log"; exit 2; }
"$program" --device cpu "$@"

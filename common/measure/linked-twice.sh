#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# linked-twice.sh: fails where a step compiled for a GPU defines a function that it defines for the emulator, too. A
# program has both, and of two inline functions of one name and parameters the linker keeps one: the GPU would use the
# emulator's. `static inline` keeps them apart. Reads the objects that lie in build; it fails, too, where none of those
# for a GPU has a header that some step includes. (A step's own functions are in a namespace without a name.)
set -euo pipefail
functions() { nm --defined-only "$1" | awk '$2 ~ /[BDTVWu]/ { print $3 }' | sort -u; }
# The same for both, as their mangled names begin: the C++ library, type information, constructors and destructors of
# the harness's types, arithmetic on plain numbers, and which of a job's processes this one is (processes.h).
same='^DW\.ref|^_ZT|^_Z[nd]|^_Z(GV)?Z?(NK?)?S|^_Z(GV)?Z?NK?9__gnu_cxx|^_ZN(4Step|10ShapeError|7Problem|9Processes)[CDa]|^(_ZGV9)?processes$|^_Z13fewest_splits'
headers() { cat -- "$@" | tr ' ' '\n' | sed 's@^\./@@' | grep -E '^(common/kernel|steps)/.*\.h$' | sort -u; }
compared=0 failed=0
for emulated in build/host/steps/*/attention.o; do
  step=$(basename "$(dirname "$emulated")")
  for object in build/cuda-*/steps/"$step"/attention.o; do
    [ -e "$object" ] || continue
    compared=$((compared + 1))
    twice=$(comm -12 <(functions "$emulated") <(functions "$object") | grep -vE "$same" | c++filt || true)
    [ -z "$twice" ] || { printf '%s: linked for the emulator and for the GPU, not static:\n%s\n' "$step" "$twice" >&2; failed=1; }
  done
done
[ $compared -gt 0 ] || { echo "linked-twice.sh: nothing in build to compare; make all with nvcc first" >&2; exit 2; }
missing=$(comm -23 <(headers build/host/steps/*/attention.o.d) <(headers build/cuda-*/steps/*/attention.o.d))
[ -z "$missing" ] || { printf 'no step that was compiled for a GPU includes:\n%s\n' "$missing" >&2; failed=1; }
[ $failed = 0 ] && echo "$compared objects of steps for a GPU define nothing that their emulated ones define"

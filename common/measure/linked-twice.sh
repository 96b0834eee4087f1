#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# linked-twice.sh: fails where a step compiled for a GPU defines a function that it defines for the emulator, too. A
# program has both, and of two inline functions of one name and parameters the linker keeps one: the GPU would use the
# emulator's. `static inline` keeps them apart. Reads the objects that lie in build. Not every step need be compiled for
# a GPU: it fails, too, if a step defines a function for the emulator that no step does which was.
set -euo pipefail
functions() { nm --defined-only "$1" | awk '$2 ~ /[BDTVWu]/ { print $3 }' | sort -u; }
# The same for both, as their mangled names begin: the C++ library, type information, constructors and destructors of
# the harness's types, arithmetic on plain numbers, and which of a job's processes this one is (processes.h).
same='^DW\.ref|^_ZT|^_Z[nd]|^_Z(GV)?Z?(NK?)?S|^_Z(GV)?Z?NK?9__gnu_cxx|^_ZN(4Step|10ShapeError|7Problem|9Processes)[CDa]|^(_ZGV9)?processes$|^_Z13fewest_splits'
# Names without parameters: what a template makes of other arguments is the same function.
names() { functions "$1" | grep -vE "$same" | c++filt | sed -E '/lambda|^emulator::|Reference|cpu_step/d; s/^(.*[ :])?([A-Za-z_0-9~]+)(<.*>)?\(.*/\2/'; }
compared=0 failed=0 all= seen=
for emulated in build/host/steps/*/attention.o; do
  step=$(basename "$(dirname "$emulated")")
  all+=$(names "$emulated")$'\n'
  for object in build/cuda-*/steps/"$step"/attention.o; do
    [ -e "$object" ] || continue
    compared=$((compared + 1))
    seen+=$(names "$emulated")$'\n'
    twice=$(comm -12 <(functions "$emulated") <(functions "$object") | grep -vE "$same" | c++filt || true)
    [ -z "$twice" ] || { printf '%s: linked for the emulator and for the GPU, not static:\n%s\n' "$step" "$twice" >&2; failed=1; }
  done
done
[ $compared -gt 0 ] || { echo "linked-twice.sh: nothing in build to compare; make all with nvcc first" >&2; exit 2; }
unseen=$(comm -23 <(sort -u <<<"$all") <(sort -u <<<"$seen"))
[ -z "$unseen" ] || { printf 'no step that was compiled for a GPU has:\n%s\n' "$unseen" >&2; failed=1; }
[ $failed = 0 ] && echo "$compared objects of steps for a GPU define nothing that their emulated ones define"

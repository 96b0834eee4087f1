#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make diff-NN: diff.sh NN: what a step's code changes in that of the step that it builds on: the one
# that the header's 'Before' names, not always the one before, because some are dead ends. The header
# itself is left out, because it is new with every step, and so are lines that are only indented anew, and those
# that only moved to a header.
set -euo pipefail
. common/measure/shell.sh
command="make diff-$1"
to=$(source_of "$1")
before=$(header "$1" before)
from=$(ls steps/"${before:-none}"-*/attention.cu 2>/dev/null) || from=/dev/null
rm -rf build/diff
mkdir -p build/diff/before build/diff/after
sed '/^#include/,$!d' $from >build/diff/before.cu
sed '/^#include/,$!d' "$to" >build/diff/after/attention.cu
# What stands in a header that only the later step includes has moved, and has not changed.
headers=$(grep -hvxFf build/diff/before.cu build/diff/after/attention.cu | sed -nE 's/^#include "((common|steps).*)"/\1/p' || true)
moved_to() { # HEADER...: prints how many lines moved to these; what did not is `before` of the diff
  awk -f common/measure/moved.awk file=1 build/diff/after/attention.cu \
    file=2 <(cat /dev/null "$@") file=3 build/diff/before.cu 2>&1 >build/diff/before/attention.cu
}
echo "step $1 against ${before:+step }${before:-nothing}"
for header in $headers; do
  moved=$(moved_to "$header")
  if [ "$moved" != 0 ]; then
    echo "$moved lines moved to a header that is new here: $header"
  elif [ "$before" ]; then
    echo "not in this diff: $header, which step $before does not include"
  fi
done
moved_to $headers >/dev/null
cd build/diff && git --no-pager diff --no-index -w --stat -p before/attention.cu after/attention.cu || true

#!/bin/sh
# make diff-NN: what a step's code changes in that of the step that it builds on: the one that the
# header's 'Before' names, not always the one before, because some are dead ends. The header itself
# is left out: it is new with every step.
step=$1
to=$(ls steps/"$step"-*/attention.cu 2>/dev/null) || {
  echo "make diff-$step: no such step; there are" \
    "$(ls steps | sed -nE 's/^([0-9]+)-.*/\1/p' | paste -sd' ')" >&2
  exit 2
}
before=$(sed -nE 's|^// Before +step ([0-9]+).*|\1|p' "$to" | head -1)
from=$(ls steps/"${before:-none}"-*/attention.cu 2>/dev/null) || from=/dev/null
rm -rf build/diff
mkdir -p build/diff/before build/diff/after
sed '/^#include/,$!d' $from >build/diff/before/attention.cu
sed '/^#include/,$!d' "$to" >build/diff/after/attention.cu
echo "step $step against ${before:+step }${before:-nothing}"
cd build/diff && git --no-pager diff --no-index --stat -p before/attention.cu after/attention.cu
true

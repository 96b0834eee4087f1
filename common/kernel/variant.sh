#!/bin/sh
# SPDX-License-Identifier: MIT
# variant.sh STEP NAME: writes the text of a variant to attention.cu in this folder: STEP/variants/NAME.patch,
# applied to the step's text; or to that of another variant, if a line before the patch is 'on: ANOTHER'. If a line is
# 'with: HEADER', the text holds this header of the step, where it would include it.
set -eu
step=$1 patch=$1/variants/$2.patch
on=$(sed -n '/^--- /q; s/^on: //p' "$patch")
if [ -n "$on" ]; then "$0" "$1" "$on"; else cp "$step/attention.cu" attention.cu; fi
for header in $(sed -n '/^--- /q; s/^with: //p' "$patch"); do
  sed -i -e "/^#include \"steps.*\/$header\"/{r $step/$header" -e 'd}' attention.cu
  sed -i '/^#pragma once/d' attention.cu
done
git apply "$patch"

#!/bin/sh
# SPDX-License-Identifier: MIT
# variant.sh STEP NAME: writes the text of a variant to attention.cu in this folder: STEP/variants/NAME.patch,
# applied to the step's text; or to that of another variant, if a line before the patch is 'on: ANOTHER'.
set -eu
step=$1 patch=$1/variants/$2.patch
on=$(sed -n '/^--- /q; s/^on: //p' "$patch")
if [ -n "$on" ]; then "$0" "$1" "$on"; else cp "$step/attention.cu" attention.cu; fi
git apply "$patch"

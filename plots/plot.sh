#!/bin/sh
# SPDX-License-Identifier: MIT
# make plot: redraws the figures from plots/results, and those of this machine's own GPU into
# build/plots.
python=${PYTHON:-python3}
for file in plots/*.py; do
  [ "$file" = plots/style.py ] || $python "$file" || exit 1
done
$python plots/seqlen.py --head-dim 64 || exit 1
if [ "$GPU" != h200 ] && [ -f "plots/results/$GPU.csv" ]; then
  mkdir -p build/plots
  for figure in ladder seqlen memory_wall hbm_bytes three_algorithms ladder_models causal decode \
    ladder_hopper hopper_seqlen ladder_backward gpu_efficiency; do
    $python plots/$figure.py --gpu "$GPU" --out build/plots || exit 1
  done
fi

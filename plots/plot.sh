#!/bin/sh
# make plot: redraws the figures from plots/results, and those of this machine's own GPU into
# build/plots. matplotlib is the system's, or comes into a virtual environment of our own.
mkdir -p build
python=${PYTHON:-python3}
$python -c 'import matplotlib' 2>/dev/null || {
  python=build/venv/bin/python
  [ -x $python ] || echo "installing matplotlib into build/venv"
  [ -x $python ] || { ${PYTHON:-python3} -m venv build/venv && build/venv/bin/pip install -q matplotlib; } \
    >build/venv.log 2>&1 || {
    rm -rf build/venv
    echo "matplotlib is missing: install it with 'apt-get install python3-matplotlib'" >&2
    exit 1
  }
}
for file in plots/*.py; do
  [ "$file" = plots/style.py ] || $python "$file" || exit 1
done
$python plots/seqlen.py --head-dim 64 || exit 1
if [ "$GPU" != h200 ] && [ -f "plots/results/$GPU.csv" ]; then
  mkdir -p build/plots
  for figure in ladder seqlen memory_wall hbm_bytes three_algorithms ladder_models causal decode \
    ladder_hopper hopper_seqlen; do
    $python plots/$figure.py --gpu "$GPU" --out build/plots || exit 1
  done
fi

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make counters: counters.sh STEP...: what the emulator counts and, with a GPU and ncu, what ncu
# measures of the same problems; and, of large ones, the HBM traffic and why warps wait. The
# emulator's counts are the same on every machine.
# With SHAPES="OPTIONS; OPTIONS..." it counts these problems instead, compares the two, and leaves the
# committed results as they are.
set -euo pipefail
. common/measure/shell.sh

# Of the steps that take no more than the plain problem, in one type or two: both head dims, several
# heads and batches, and an odd number of tiles of Q, and of K for tiles of 128. Whoever wrote a kernel
# had other shapes in mind.
small=("--batch 1 --heads 2 --seqlen 512 --head-dim 128" "--batch 1 --heads 3 --seqlen 384 --head-dim 64"
  "--batch 2 --heads 1 --seqlen 640 --head-dim 128")
# Scores and outputs far larger than the L2 cache.
large="--batch 4 --heads 16 --seqlen 4096 --head-dim 128"

# Of the others, what each is about: NN OPTIONS. Lengths that fit no tile; of each head dim one. More tiles than an
# H200 has multiprocessors, 132, and a number of splits that follows from it.
problems="
20 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
20 --causal --batch 2 --heads 1 --seqlen 384 --head-dim 128
21 --causal --batch 1 --heads 2 --seqlen 333 --head-dim 64 --seqlen-k 517
21 --batch 1 --heads 2 --seqlen 259 --head-dim 128
22 --layout interleaved --causal --batch 1 --heads 3 --seqlen 333 --head-dim 64
22 --layout packed --lengths 129,0,301 --batch 3 --heads 1 --seqlen 301 --head-dim 128
23 --kv-heads 2 --causal --batch 1 --heads 6 --seqlen 257 --head-dim 64
23 --kv-heads 1 --batch 1 --heads 2 --seqlen 257 --head-dim 128
24 --rope halves --causal --batch 1 --heads 2 --seqlen 320 --head-dim 64
24 --rope neighbours --batch 1 --heads 2 --seqlen 257 --head-dim 128
25 --kv-heads 2 --seqlen-k 1000 --batch 1 --heads 16 --seqlen 1 --head-dim 128
25 --causal --kv-heads 2 --seqlen-k 517 --batch 2 --heads 8 --seqlen 3 --head-dim 64
26 --kv-heads 2 --seqlen-k 1000 --batch 1 --heads 16 --seqlen 1 --head-dim 128
26 --kv-heads 2 --seqlen-k 517 --append 1 --batch 2 --heads 8 --seqlen 1 --head-dim 64
27 --kv-heads 2 --seqlen-k 1000 --splits 4 --batch 1 --heads 16 --seqlen 1 --head-dim 128
27 --kv-heads 2 --seqlen-k 517 --splits 3 --batch 2 --heads 8 --seqlen 1 --head-dim 64
27 --kv-heads 2 --seqlen-k 133 --batch 67 --heads 4 --seqlen 1 --head-dim 128
28 --window 100 --batch 1 --heads 2 --seqlen 512 --head-dim 64
28 --window 200 --sinks 4 --batch 1 --heads 2 --seqlen 517 --head-dim 128
29 --type bf16 --batch 1 --heads 2 --seqlen 257 --head-dim 80
29 --batch 1 --heads 2 --seqlen 257 --head-dim 256
50 --causal --kv-heads 2 --rope halves --batch 1 --heads 4 --seqlen 259 --head-dim 128
50 --kv-heads 2 --seqlen-k 517 --batch 1 --heads 16 --seqlen 1 --head-dim 128
24 --rope halves --batch 1 --heads 3 --seqlen 291 --head-dim 128
26 --kv-heads 1 --seqlen-k 1301 --batch 1 --heads 5 --seqlen 1 --head-dim 128
27 --kv-heads 1 --seqlen-k 3331 --splits 26 --batch 3 --heads 7 --seqlen 1 --head-dim 128
29 --type bf16 --batch 1 --heads 1 --seqlen 175 --head-dim 192
29 --batch 1 --heads 2 --seqlen 353 --head-dim 96
50 --kv-heads 1 --seqlen-k 3331 --splits 26 --batch 3 --heads 7 --seqlen 1 --head-dim 128
50 --causal --batch 1 --heads 3 --seqlen 203 --head-dim 64
50 --batch 1 --heads 2 --seqlen 331 --head-dim 192
36 --type bf16 --batch 5 --heads 33 --seqlen 256 --head-dim 64
37 --type bf16 --batch 5 --heads 33 --seqlen 256 --head-dim 64
39 --type bf16 --batch 5 --heads 33 --seqlen 256 --head-dim 64
41 --causal --batch 7 --heads 21 --seqlen 384 --head-dim 128
38 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
38 --causal --batch 2 --heads 1 --seqlen 384 --head-dim 128
39 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
39 --causal --batch 2 --heads 1 --seqlen 384 --head-dim 128
42 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
42 --causal --batch 2 --heads 1 --seqlen 384 --head-dim 128
43 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
43 --causal --batch 2 --heads 1 --seqlen 384 --head-dim 128
44 --causal --kv-heads 1 --batch 1 --heads 3 --seqlen 640 --head-dim 64
44 --kv-heads 2 --batch 2 --heads 4 --seqlen 384 --head-dim 128
45 --causal --seqlen-k 517 --batch 1 --heads 3 --seqlen 333 --head-dim 64
45 --layout packed --lengths 129,0,301 --batch 3 --heads 1 --seqlen 301 --head-dim 128
46 --window 100 --batch 1 --heads 3 --seqlen 517 --head-dim 64
46 --window-size 30:200 --batch 2 --heads 1 --seqlen 384 --head-dim 128
51 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
51 --scale 0.05 --batch 2 --heads 1 --seqlen 384 --head-dim 128
52 --causal --softcap 30 --sink-logits --batch 1 --heads 3 --seqlen 640 --head-dim 64
52 --alibi --batch 2 --heads 1 --seqlen 384 --head-dim 128
53 --causal --layout packed --lengths 129,0,301 --batch 3 --heads 2 --seqlen 301 --head-dim 64
53 --batch 1 --heads 3 --seqlen 259 --head-dim 128
54 --causal --kv-heads 1 --seqlen-k 517 --page-size 24 --batch 2 --heads 2 --seqlen 333 --head-dim 64
54 --seqlen-k 517 --page-size 256 --batch 1 --heads 3 --seqlen 259 --head-dim 128
86 --causal --kv-heads 1 --seqlen-k 517 --page-size 24 --append 333 --batch 2 --heads 2 --seqlen 333 --head-dim 64
86 --seqlen-k 517 --page-size 256 --append 100 --batch 1 --heads 3 --seqlen 259 --head-dim 128
89 --causal --kv-heads 1 --seqlen-k 517 --page-size 24 --append 333 --rope halves --rope-dim 32 --batch 2 --heads 2 --seqlen 333 --head-dim 64
89 --rope neighbours --batch 1 --heads 3 --seqlen 259 --head-dim 128
55 --kv-heads 2 --seqlen-k 1000 --splits 4 --batch 1 --heads 16 --seqlen 1 --head-dim 128
55 --kv-heads 2 --seqlen-k 517 --page-size 24 --batch 2 --heads 8 --seqlen 1 --head-dim 64
58 --kv-heads 1 --seqlen-k 1000 --batch 1 --heads 128 --seqlen 1 --head-dim 576
58 --kv-heads 2 --seqlen-k 517 --batch 2 --heads 16 --seqlen 3 --head-dim 576
82 --kv-heads 1 --seqlen-k 1000 --batch 1 --heads 128 --seqlen 1 --head-dim 576
82 --kv-heads 2 --seqlen-k 517 --batch 2 --heads 16 --seqlen 3 --head-dim 576
83 --kv-heads 1 --seqlen-k 1000 --batch 1 --heads 128 --seqlen 1 --head-dim 576
83 --causal --kv-heads 2 --seqlen-k 517 --page-size 24 --batch 2 --heads 16 --seqlen 3 --head-dim 576
84 --kv-heads 1 --seqlen-k 1000 --splits 4 --batch 1 --heads 128 --seqlen 1 --head-dim 576
84 --causal --kv-heads 2 --seqlen-k 517 --page-size 24 --batch 2 --heads 16 --seqlen 3 --head-dim 576
59 --kv-heads 2 --seqlen-k 1000 --batch 1 --heads 16 --seqlen 1 --head-dim 128
59 --kv-heads 2 --seqlen-k 517 --page-size 24 --batch 2 --heads 8 --seqlen 1 --head-dim 64
65 --causal --kv-heads 1 --seqlen-k 517 --batch 1 --heads 3 --seqlen 333 --head-dim 64
65 --window-size 100:20 --layout packed --lengths 129,0,301 --batch 3 --heads 1 --seqlen 301 --head-dim 128
69 --causal --kv-heads 1 --seqlen-k 517 --batch 1 --heads 3 --seqlen 333 --head-dim 96
69 --window-size 100:20 --layout packed --lengths 129,0,301 --batch 3 --heads 1 --seqlen 301 --head-dim 128
69 --batch 1 --heads 1 --seqlen 259 --head-dim 256
66 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
66 --batch 2 --heads 1 --seqlen 384 --head-dim 128
67 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
67 --batch 2 --heads 1 --seqlen 384 --head-dim 128
68 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 64
68 --batch 2 --heads 1 --seqlen 384 --head-dim 128
88 --causal --seqlen-k 517 --batch 1 --heads 3 --seqlen 333 --head-dim 96
88 --layout packed --lengths 129,0,301 --batch 3 --heads 1 --seqlen 301 --head-dim 128
80 --causal --kv-heads 1 --seqlen-k 517 --batch 1 --heads 3 --seqlen 333 --head-dim 96
80 --window-size 100:20 --layout packed --lengths 129,0,301 --batch 3 --heads 1 --seqlen 301 --head-dim 128
87 --causal --kv-heads 1 --seqlen-k 517 --batch 1 --heads 3 --seqlen 333 --head-dim 136
87 --window-size 100:20 --layout packed --lengths 129,0,301 --batch 3 --heads 1 --seqlen 301 --head-dim 256
81 --causal --kv-heads 1 --seqlen-k 517 --softcap 30 --sink-logits --batch 1 --heads 3 --seqlen 333 --head-dim 96
81 --window-size 100:20 --layout packed --lengths 129,0,301 --alibi --batch 3 --heads 1 --seqlen 301 --head-dim 128
90 --causal --batch 1 --heads 3 --seqlen 333 --head-dim 64
90 --kv-heads 2 --seqlen-k 500 --window-size 100:20 --batch 1 --heads 4 --seqlen 259 --head-dim 128
91 --causal --batch 1 --heads 3 --seqlen 333 --head-dim 96
91 --kv-heads 2 --seqlen-k 500 --window-size 100:20 --batch 1 --heads 4 --seqlen 259 --head-dim 80
92 --causal --batch 1 --heads 3 --seqlen 333 --head-dim 128
92 --kv-heads 2 --seqlen-k 500 --window-size 100:20 --batch 1 --heads 4 --seqlen 259 --head-dim 64
40 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 128
40 --batch 2 --heads 1 --seqlen 384 --head-dim 128
41 --causal --batch 1 --heads 3 --seqlen 640 --head-dim 128
41 --batch 2 --heads 1 --seqlen 384 --head-dim 128
"
large_problems="
20 --causal $large
23 --kv-heads 2 $large
24 --rope halves $large
27 --kv-heads 8 --seqlen-k 16384 --batch 16 --heads 64 --seqlen 1 --head-dim 128
39 --causal $large
41 $large
41 --causal $large
"

# counted STEP: the options of each problem that is counted. (No output is no failure.)
counted() { ! is_plain "$1" || printf '%s\n' "${small[@]}"; of "$1" "$problems"; }
counted_large() { if is_plain "$1"; then echo "$large"; else of "$1" "$large_problems"; fi; }
of() { sed -n "s/^$(number_of "$1") //p" <<<"$2"; }

can_measure=
[ -z "$GPU" ] || [ -z "$NVCC" ] || ! command -v ncu >/dev/null || can_measure=yes
ncu_csv() { ncu --clock-control none --metrics "$1" --csv "${@:2}" </dev/null; }
# The emulated GPU has as many multiprocessors as the one that measures; without one, as many as an H200.
sms=132
[ -z "$can_measure" ] || sms=$(ncu_csv device__attribute_multiprocessor_count "./step-$(number_of "$1")" \
  --device gpu --check-only | awk -F'","' '$13 ~ /multiprocessor_count/ { print $15 + 0; exit }')
[[ $sms =~ ^[1-9] ]] || { echo "make counters: ncu does not say how many multiprocessors this GPU has" >&2; exit 1; }

# The lines whose counts truth.awk needs: a name, the file, and the text that one line of it contains.
places="
store_part 27-split-kv/attention.cu store<4>(parts(row, col)
store_rotated_1 50-in-a-model/decode.h store<8>(smem.Q(row, col), left)
store_rotated_2 50-in-a-model/tiles.h store<8>(tile(i, col), left)
"
while read -r name file text; do
  [ -n "$name" ] || continue
  line=$(grep -nF -- "$text" "steps/$file" | cut -d: -f1 || :)
  [[ $line =~ ^[0-9]+$ ]] || {
    echo "make counters: one line of steps/$file must contain '$text', not ${line:-none}" >&2
    exit 2
  }
  names+="/^${file%/*},/s/,${file#*/}:$line,/,$name,/;"
done <<<"$places"

# begin NAME...: nothing is counted yet. in_rows NAME...: of all that was counted, one row of each problem.
begin() { for name; do : >"build/$name.csv"; done; }
in_rows() {
  for name; do
    awk -f common/measure/problems.awk "build/$name.csv" >build/rows.csv
    mv build/rows.csv "build/$name.csv"
  done
}

# emulate FILE STEP OPTIONS: appends what the emulator counts of the whole step and of these lines. Beside FILE is what
# the step prints. Status 2: the step does not take the problem.
emulate() {
  local status=0
  rm -f "$1.profile"
  ./step-"$(number_of "$2")" --device cpu --sms "$sms" $3 --profile-csv "$1.profile" \
    >"$1.txt" 2>&1 </dev/null || status=$?
  case $status in
    0) head -3 "$1.txt" ;;
    2) return 2 ;;
    *) cat "$1.txt" >&2; exit $status ;;
  esac
  sed "1d;$names" "$1.profile" | grep -v '\.[a-z]*:[0-9]*,"' >>"$1"
}

# metrics KIND: those of ncu.awk's table, with commas
metrics() { sed -nE "s/^ *$1\[\"([^\"]+)\"\].*/\1/p" common/measure/ncu.awk | paste -sd,; }
# What the emulator counts: the third field between quotes in its table. Hopper's metrics are not there
# on other GPUs, and its steps alone have something to count.
counted_metrics=$(awk -F'"' '/^COUNTER\(/ { print $4 }' common/emulator/counters.def | tr ' ' '\n' | grep . |
  sort -u)
of_hopper() { [[ $(header "$(number_of "$1")" needs) == sm_90* ]]; }
metrics_counted() {
  { if of_hopper "$1"; then echo "$counted_metrics"; else grep -vE 'gmma|_tma_' <<<"$counted_metrics"; fi
    metrics count; } | paste -sd,
}
metrics_stalls() { echo "$(metrics stall)$(! of_hopper "$1" || echo ",$(metrics hopper_stall)")"; }

# measure FILE METRICS STEP OPTIONS: appends what ncu measures
measure() {
  echo "ncu $3 $4"
  local status=0 row=build/row.csv problem after skip=
  rm -f $row
  # The first kernel of a backward pass's program is the program's own: the forward pass.
  [ "$(describe "$(number_of "$3")" writes)" != "dQ dK dV" ] || skip="--launch-skip 1"
  ncu_csv "$2" $skip ./step-"$(number_of "$3")" --device gpu --check-only $4 --csv $row >build/ncu.txt 2>&1 || status=$?
  if [ $status != 0 ]; then
    tail -3 build/ncu.txt
    grep -q 'returned an error code (2)' build/ncu.txt || exit 1  # 2: the step does not take it
    return 0
  fi
  # Of the row: what stands between the device and the columns after the options.
  after=$(head -1 $row | sed 's/.*,options,//; s/[^,]//g' | wc -c)
  problem=$(tail -1 $row | sed -E 's/^[^,]*,"[^"]*",//; s/(,[^,]*){'"$after"'}$//')
  awk -f common/measure/ncu.awk -v step="$3" -v problem="$problem" common/emulator/counters.def \
    build/ncu.txt | sort >>"build/$1.csv"
}

if [ -n "${SHAPES:-}" ]; then
  begin shapes-counters
  while read -r shape; do
    for step; do
      # What the shape leaves out is the emulator's default, on the GPU, too.
      problem="$(describe "$(number_of "$step")" emulator | sed -E 's/(^| )([a-z])/\1--\2/g; s/=/ /g') $shape"
      emulate build/shapes-counters.csv "$step" "$problem" || { tail -1 build/shapes-counters.csv.txt; continue; }
      [ -z "$can_measure" ] || measure shapes-counters "$(metrics_counted "$step")" "$step" "$problem"
    done
  done < <(tr ';' '\n' <<<"$SHAPES" | sed -E 's/^ +//; /^$/d')
  in_rows shapes-counters
  ALL=1 common/measure/truth.sh build/shapes-counters.csv || status=$?
  [ -n "$can_measure" ] || echo "SKIP: no GPU, nvcc or ncu to measure with; these are the emulator's counts alone"
  exit ${status:-0}
fi

# On all cores, a step on each.
rm -rf build/counting
mkdir build/counting
emulate_all() {  # some steps have no problem
  : >"build/counting/$1"
  while read -r problem; do
    emulate "build/counting/$1" "$1" "$problem" || echo "left out: $1 at $problem"
  done < <(counted "$1")
}
for step; do
  emulate_all "$step" &
  [ "$(jobs -rp | wc -l)" -lt "$(getconf _NPROCESSORS_ONLN)" ] || wait -n
done
while [ -n "$(jobs -p)" ]; do wait -n; done
(cd build/counting && cat "$@") >build/counted.csv
in_rows counted
mv build/counted.csv "$results/emulator-counters.csv"

# What each block does, for the picture of the causal step's schedule.
rm -f build/blocks.csv
if [ -e step-20 ]; then
  build step-20-in-order
  for program in step-20-in-order step-20; do
    ./$program --device cpu --causal --heads 3 --seqlen 2048 --head-dim 64 --blocks-csv build/blocks.csv \
      >/dev/null
  done
  mv build/blocks.csv "$results/blocks-20.csv"
fi

# What block 0's warpgroups do, and in which order, for the picture of who does what.
rm -f build/events.csv
if [ -e step-33 ]; then
  for number in 33 34 35; do
    ./step-$number --device cpu --heads 1 --seqlen 768 --head-dim 128 --events-csv build/events.csv >/dev/null
  done
  mv build/events.csv "$results/events-34.csv"
fi

# Block 0's first request at each place, for the bank maps: of the kind that they draw.
rm -f "$results"/trace-*.csv
for step; do
  case $step in
    02-* | 03-*) shape= drawn=load ;;
    05-* | 06-*) shape="--head-dim 128" drawn=ldmatrix ;;
    *) continue ;;
  esac
  ./step-"$(number_of "$step")" --device cpu $shape --trace-csv build/trace.csv >/dev/null
  awk -F, "NR == 1 || (\$2 == \"$drawn\" && \$3 == 0)" build/trace.csv >"$results/trace-$step.csv"
  rm build/trace.csv
done

# What four GPUs do, and when, for the pictures of hops.
for step; do
  case $step in
    71-* | 72-*) ;;
    *) continue ;;
  esac
  for mask in "" --causal; do
    ./step-"$(number_of "$step")" --device cpu --gpus 4 --heads 1 --seqlen 2048 --head-dim 128 $mask \
      --streams-csv "$results/trace-$step.csv" >/dev/null
  done
done

[ -n "$can_measure" ] || {
  echo "SKIP: no GPU, nvcc or ncu to measure with; the emulator's counts: $results/emulator-counters.csv"
  exit
}
begin counters hbm-counters stalls-counters
for step; do
  while read -r problem; do
    measure counters "$(metrics_counted "$step")" "$step" "$problem"
  done < <(counted "$step")
done
for step; do
  while read -r problem; do
    measure hbm-counters "$(metrics traffic)" "$step" "$problem"
    measure stalls-counters "$(metrics_stalls "$step")" "$step" "$problem"
  done < <(counted_large "$step")
done
in_rows counters hbm-counters stalls-counters
finish counters hbm-counters stalls-counters
common/measure/truth.sh "$results/$GPU-counters.csv"

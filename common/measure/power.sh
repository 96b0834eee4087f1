#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# make power: power.sh STEP...: what the GPU draws, and at which clock, while it runs a step again and
# again for a few seconds; into plots/results/GPU-power.csv, all from one run:
#   power-NAME            W, clock-NAME MHz, capped-NAME %: of nvidia-smi's samples, their medians and
#                         the part of them in which power held the clock down
#   speed-NAME            TFLOP/s, in the same seconds, and speed-per-clock-NAME TFLOP/s per GHz
#   clock-in-kernel-NAME  MHz: cycles over nanoseconds, read in the kernel (variants/clock.patch)
# NAME is a step, a step/inputs, or a loop of mma in ceilings.cu.
set -euo pipefail
. common/measure/shell.sh
need_gpu
steps=("$@")
seconds=${SECONDS_EACH:-5}
csv=build/power.csv
echo name,value,unit >"$csv"
samples=build/power-samples.csv
query=power.draw,clocks.sm,clocks_event_reasons.active
nvidia-smi --query-gpu=$query --format=csv,noheader >/dev/null 2>&1 ||
  query=power.draw,clocks.sm,clocks_throttle_reasons.active # drivers before 535

# sampled COMMAND...: runs it, and samples 25 times a second while it does
sampled() {
  nvidia-smi -i 0 --query-gpu=$query --format=csv,noheader,nounits -lms 40 >"$samples" &
  local sampler=$! status=0
  "$@" >build/power.txt || status=$?
  kill $sampler
  wait $sampler 2>/dev/null || true
  [ $status = 0 ] || { cat build/power.txt; exit $status; }
}

median() { sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'; }

# record NAME TFLOPS: of the samples those in which the GPU works: more power than half way from the
# least to the most, without the first second of them, in which the GPU grows warm.
record() {
  local watts mhz capped
  awk -F', *' 'NR == FNR { p = $1 + 0; if (NR == 1 || p < least) least = p; if (p > most) most = p; next }
    $1 > (least + most) / 2 && ++n > 25' "$samples" "$samples" >build/power-busy.csv
  watts=$(cut -d, -f1 build/power-busy.csv | median)
  mhz=$(cut -d, -f2 build/power-busy.csv | median)
  # Bit 0x4 is SW Power Cap, 0x80 HW Power Brake: nvml.h, nvmlClocksEventReason.
  capped=$(awk -F', *' '{ bit = substr($3, length($3)); brake = substr($3, length($3) - 1, 1)
    n += bit ~ /[4-7c-fC-F]/ || brake ~ /[89a-fA-F]/ } END { if (NR) printf "%.0f", 100 * n / NR }' build/power-busy.csv)
  if [ -z "$watts" ]; then
    echo "$1: nvidia-smi gave no sample while the GPU was busy: left out" >&2
    return
  fi
  {
    echo "power-$1,$watts,W"
    echo "clock-$1,$mhz,MHz"
    echo "capped-$1,$capped,%"
    echo "speed-$1,$2,TFLOP/s"
    awk -v name="$1" -v tflops="$2" -v mhz="$mhz" \
      'BEGIN { printf "speed-per-clock-%s,%.4g,TFLOP/s/GHz\n", name, tflops / mhz * 1000 }'
  } | tee -a "$csv"
}

# iterations PROGRAM: launches that take so many seconds
iterations() {
  rm -f build/power-row.csv
  "$@" --iters 3 --csv build/power-row.csv >/dev/null
  awk -F, -v s="$seconds" -v column=median_ms 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == column) c = i }
    END { printf "%d", s * 1000 / $c + 1 }' build/power-row.csv
}

# step_power NN INPUTS
step_power() {
  local step=$1 inputs=$2 program
  program=./step-$(number_of "$step")
  local iters
  iters=$(iterations "$program" --device gpu --inputs "$inputs")
  rm -f build/power-row.csv
  sampled "$program" --device gpu --inputs "$inputs" --iters "$iters" --csv build/power-row.csv
  [ "$inputs" = normal ] || step=$step/$inputs
  record "$step" "$(awk -F, -v column=tflops 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == column) c = i }
    END { print $c }' build/power-row.csv)"
}

for step in "${steps[@]}"; do
  case $step in
    05-* | 07-* | 10-* | 11-* | 13-* | 14-* | 16-*) step_power "$step" normal ;;
    15-*) for inputs in normal equal-keys one-hot; do step_power "$step" $inputs; done ;;
  esac
done

for loop in mma mma-zeros; do
  sampled "$BUILD/bin/ceilings" --only $loop --seconds "$seconds" --csv build/power-ceiling.csv
  record $loop "$(sed -n "s/^$loop,\([^,]*\),.*/\1/p" build/power-ceiling.csv)"
  sed -n "s/^$loop-clock,\([^,]*\),.*/\1/p" build/power-ceiling.csv |
    awk -v name=$loop '{ printf "clock-in-kernel-%s,%.0f,MHz\n", name, 1000 * $1 }' | tee -a "$csv"
done

# The variants print a clock for each launch: of those that are timed, the median.
for program in step-[0-9][0-9]-clock; do
  [ -x "$program" ] || continue
  n=${program#step-} n=${n%%-*}
  for step in "${steps[@]}"; do
    [ "${step%%-*}" = "$n" ] || continue
    ./"$program" --device gpu --iters "$(iterations ./"$program" --device gpu)" >build/power.txt
    echo "clock-in-kernel-$step,$(sed -n 's/^clock \([0-9]*\) MHz$/\1/p' build/power.txt | median),MHz" |
      tee -a "$csv"
  done
done
finish power

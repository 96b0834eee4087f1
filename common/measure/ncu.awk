# SPDX-License-Identifier: MIT
# Turns the CSV that ncu prints into rows for problems.awk: the sum over all kernels of a step.
# Input: common/emulator/counters.def, and what ncu printed.
# Variables: step, problem: "batch,heads,seqlen,head_dim,options".
# A ratio has no sum: it is left out for a step of several kernels.
# What the emulator counts is in counters.def, with the metrics whose sum it is. Here is the rest that
# counters.sh asks ncu for: `traffic` and `stall` (of Hopper's steps `hopper_stall`, too) at a large shape.
BEGIN {
  FS = "\",\""
  count["memory_l1_wavefronts_shared_ideal"] = "shared wavefronts, ideal"
  traffic["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] = "global load sectors"
  traffic["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"] = "global store sectors"
  traffic["dram__bytes_read.sum"] = "dram bytes read"
  traffic["dram__bytes_write.sum"] = "dram bytes written"
  stall["smsp__issue_active.avg.pct_of_peak_sustained_active"] = "issue slots used, percent"
  stall["smsp__inst_executed.sum"] = "instructions"
  stall["sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"] = "tensor cores busy, percent"
  stall["sm__warps_active.avg.per_cycle_active"] = "warps resident a multiprocessor"
  stall["l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"] = "shared memory busy, percent"
  stall["smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"] = "warps per issue: selected"
  stall["smsp__average_warps_issue_stalled_not_selected_per_issue_active.ratio"] = "warps per issue: not_selected"
  stall["smsp__average_warps_issue_stalled_dispatch_stall_per_issue_active.ratio"] = "warps per issue: dispatch_stall"
  stall["smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio"] = "warps per issue: short_scoreboard"
  stall["smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"] = "warps per issue: long_scoreboard"
  stall["smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"] = "warps per issue: wait"
  stall["smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio"] = "warps per issue: mio_throttle"
  stall["smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio"] = "warps per issue: lg_throttle"
  stall["smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio"] = "warps per issue: math_pipe_throttle"
  stall["smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"] = "warps per issue: barrier"
  # The same, of the steps that have Hopper's instructions.
  hopper_stall["sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma_cycles_active.avg.pct_of_peak_sustained_active"] = "tensor cores busy with wgmma, percent"
  hopper_stall["sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"] = "exponential units busy, percent"
  hopper_stall["lts__t_sectors.avg.pct_of_peak_sustained_elapsed"] = "L2 cache busy, percent"
  hopper_stall["smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"] = "warps per issue: gmma"
  for (metric in count) name[metric] = count[metric]
  for (metric in traffic) name[metric] = traffic[metric]
  for (metric in stall) name[metric] = stall[metric]
  for (metric in hopper_stall) name[metric] = hopper_stall[metric]
}
/^COUNTER\(/ {
  split($0, quoted, "\"")
  split(quoted[4], metrics, " ")
  # Two rows share a metric: ldmatrix (LDSM) is a shared load, and counted by itself.
  for (i in metrics) counters_of[metrics[i]] = counters_of[metrics[i]] quoted[2] "|"
}
/^"[0-9]+"/ && ($13 in counters_of || $13 in name) {
  value = $15
  gsub(/[",]/, "", value)
  sub(/ .*/, "", value)
  measured[$13] += value
  n = split($13 in counters_of ? counters_of[$13] : name[$13] "|", list, "|")
  for (i = 1; i < n; i++) {
    sum[list[i]] += value
    kernels[list[i]]++
  }
}
END {
  # Before a cp.async, ptxas puts loads that are switched off (@!PT LDS). They cost no wavefront: they
  # are no requests.
  if (sum["ldmatrix"] > 0 && measured["smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"] == 0)
    sum["shared load requests"] = sum["ldmatrix"]
  for (counter in sum) {
    # The emulator lists these only where there are any. (The pipe's count of mma includes other fp16
    # instructions: it is one where there is ldmatrix.)
    if (counter ~ /^(ldmatrix|cp.async.*|wgmma|TMA .*)$/ && sum[counter] == 0) continue
    if (counter == "mma" && sum["ldmatrix"] == 0) continue
    if (kernels[counter] > 1 && counter ~ /percent|warps/) continue
    row(counter, sum[counter])
    if (counter == "global load sectors") row("global bytes read", 32 * sum[counter])
    if (counter == "global store sectors") row("global bytes written", 32 * sum[counter])
  }
}
function row(counter, value) {
  printf "%s,ncu,%s,0,\"%s\",%s\n", step, problem, counter,
    value == int(value) ? sprintf("%.0f", value) : value
}

# Turns the CSV that ncu prints into rows of a counters CSV: the sum over all kernels of a step.
# Variables: step, batch, heads, seqlen, head_dim.
# A ratio has no sum: it is left out for a step of several kernels.
BEGIN {
  FS = "\",\""
  # ldmatrix (LDSM) is a load, too; the emulator counts it among them and by itself.
  name["smsp__inst_executed_op_shared_ld.sum"] = "plain loads"
  name["smsp__inst_executed_op_ldsm.sum"] = "ldmatrix"
  name["smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"] = "plain load wavefronts"
  name["smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum"] = "ldmatrix wavefronts"
  name["smsp__inst_executed_op_ldgsts.sum"] = "cp.async requests"
  name["smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldgsts.sum"] = "cp.async wavefronts"
  name["smsp__inst_executed_pipe_tensor_op_hmma.sum"] = "mma"
  name["smsp__inst_executed_op_shared_st.sum"] = "shared store requests"
  name["smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum"] = "shared store wavefronts"
  name["memory_l1_wavefronts_shared_ideal"] = "shared wavefronts, ideal"
  name["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"] = "global load requests"
  name["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] = "global load sectors"
  name["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"] = "global store requests"
  name["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"] = "global store sectors"
  name["dram__bytes_read.sum"] = "dram bytes read"
  name["dram__bytes_write.sum"] = "dram bytes written"
  name["smsp__issue_active.avg.pct_of_peak_sustained_active"] = "issue slots used, percent"
  name["smsp__inst_executed.sum"] = "instructions"
  name["sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"] = "tensor cores busy, percent"
  name["sm__warps_active.avg.per_cycle_active"] = "warps resident a multiprocessor"
  name["l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"] = "shared memory busy, percent"
  split("selected not_selected dispatch_stall short_scoreboard long_scoreboard wait mio_throttle " \
        "math_pipe_throttle barrier", reasons, " ")
  for (i in reasons)
    name["smsp__average_warps_issue_stalled_" reasons[i] "_per_issue_active.ratio"] = \
      "warps per issue: " reasons[i]
}
/^"[0-9]+"/ && ($13 in name) {
  value = $15
  gsub(/[",]/, "", value)
  sub(/ .*/, "", value)
  sum[name[$13]] += value
  kernels[name[$13]]++
}
END {
  # Before a cp.async, ptxas puts loads that are switched off (@!PT LDS). They cost no wavefront: they
  # are no requests.
  if ("ldmatrix" in sum) {
    if (sum["plain load wavefronts"] == 0) sum["plain loads"] = 0
    sum["shared load requests"] = sum["plain loads"] + sum["ldmatrix"]
    sum["shared load wavefronts"] = sum["plain load wavefronts"] + sum["ldmatrix wavefronts"]
  }
  for (counter in sum) {
    if (counter ~ /^plain|^ldmatrix wavefronts/) continue
    # The emulator lists these only where there are any. (The pipe's count of mma includes other fp16
    # instructions: it is one where there is ldmatrix.)
    if (counter ~ /^(ldmatrix|cp.async.*)$/ && sum[counter] == 0) continue
    if (counter == "mma" && sum["ldmatrix"] == 0) continue
    if (kernels[counter] > 1 && counter ~ /percent|warps/) continue
    row(counter, sum[counter])
    if (counter == "global load sectors") row("global bytes read", 32 * sum[counter])
    if (counter == "global store sectors") row("global bytes written", 32 * sum[counter])
  }
}
function row(counter, value) {
  printf "%s,ncu,%s,%s,%s,%s,total,0,\"%s\",%s\n", step, batch, heads, seqlen, head_dim, counter, value == int(value) ? sprintf("%.0f", value) : value
}

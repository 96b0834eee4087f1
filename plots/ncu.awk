# Turns the CSV that ncu prints into rows of a counters CSV: the sum over all kernels of a step.
# Variables: step, batch, heads, seqlen, head_dim.
BEGIN {
  FS = "\",\""
  name["smsp__inst_executed_op_shared_ld.sum"] = "shared load requests"
  name["smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"] = "shared load wavefronts"
  name["smsp__inst_executed_op_shared_st.sum"] = "shared store requests"
  name["smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum"] = "shared store wavefronts"
  name["memory_l1_wavefronts_shared_ideal"] = "shared wavefronts, ideal"
  name["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"] = "global load requests"
  name["l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"] = "global load sectors"
  name["l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"] = "global store requests"
  name["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"] = "global store sectors"
  name["dram__bytes_read.sum"] = "dram bytes read"
  name["dram__bytes_write.sum"] = "dram bytes written"
}
/^"[0-9]+"/ && ($13 in name) {
  value = $15
  gsub(/[",]/, "", value)
  sub(/ .*/, "", value)
  sum[name[$13]] += value
}
END {
  for (counter in sum) {
    row(counter, sum[counter])
    if (counter == "global load sectors") row("global bytes read", 32 * sum[counter])
    if (counter == "global store sectors") row("global bytes written", 32 * sum[counter])
  }
}
function row(counter, value) {
  printf "%s,ncu,%s,%s,%s,%s,total,0,\"%s\",%.0f\n", step, batch, heads, seqlen, head_dim, counter, value
}

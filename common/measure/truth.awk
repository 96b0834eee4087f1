# Compares the emulator's counts with ncu's, problem by problem. Input: lines "tile STEP Br 64" for Br,
# Bc and the warps of a block, lines of truth.open, and a counters CSV. Exit status 1 if they differ where
# nothing here explains it and truth.open does not have the difference.
#
# Explained, and computed from the shape: instructions that are issued and switched off, which ncu
# counts as requests.
# 1. Copies of the last iteration. `if (j + Bc < seqlen) load_tile(K)` is a branch at head
# dim 128; at head dim 64 a thread has four copies per tile, and ptxas puts a predicate on each
# instead (`make sass-15`: @!P1 LDGSTS). In the last iteration the warp issues them, and ncu counts
# them, though no lane copies. In steps 11 to 14 it also gives each 32 wavefronts, 4 of
# them ideal, in step 15 none; why, we do not know. A warp of a block has Bc d / 8 / threads of
# them, so all the warps of all the blocks have batch heads (seqlen / Br) (Bc d / 8 / 32).
# 2. In step 12 at head dim 128 the next fragment's ldmatrix has a predicate, which is off once in
# each iteration of each warp.
BEGIN { FS = "," }

$1 ~ /^tile / {
  split($1, word, " ")
  tile[word[2], word[3]] = word[4]
  next
}
$1 ~ /^open / {
  open[substr($0, 6)] = 1
  next
}
$2 == "emulator" || $2 == "ncu" {
  # What follows the shape: the options, between quotes if they hold a comma; the line, 0 for all of
  # them; the counter, between quotes; the value.
  n = split($0, part, "\"")
  options = substr($0, 1, length($0) - length(part[n]) - length(part[n - 1]) - 3)
  for (i = 0; i < 6; i++) sub(/^[^,]*,/, "", options)
  if (!sub(/,0$/, "", options)) next
  gsub("\"", "", options)
  key = $1 "|" $3 "|" $4 "|" $5 "|" $6 "|" options "|" part[n - 1]
  if (!(key in known)) order[++keys] = key
  known[key] = 1
  count[key, $2] = substr(part[n], 2)
}

function explained(step, batch, heads, seqlen, head_dim, counter, more,  blocks, off) {
  blocks = batch * heads * seqlen / tile[step, "Br"]
  if (head_dim == 128 && step ~ /^12-/ && counter ~ /^(ldmatrix|shared load requests)$/ &&
      more == blocks * tile[step, "warps"] * seqlen / tile[step, "Bc"])
    return more " switched off"
  if (head_dim != 64 || step !~ /^(1[1-5]|20)-/) return ""
  off = blocks * tile[step, "Bc"] * head_dim / 8 / 32
  if (counter == "cp.async requests" && more == off) return off " switched off"
  if (counter == "cp.async wavefronts" && more == 32 * off) return off " switched off, 32 each"
  if (counter == "shared wavefronts, ideal" && more == 4 * off) return off " switched off, 4 each"
  return ""
}

END {
  for (i = 1; i <= keys; i++) {
    key = order[i]
    if (!((key, "emulator") in count) || !((key, "ncu") in count)) continue
    split(key, part, "|")
    counter = part[7]
    shape = "batch " part[2] ", heads " part[3] ", seqlen " part[4] ", head dim " part[5] \
      (part[6] == "" ? "" : ", " part[6])
    if (!(shape in compared)) shapes[++number] = shape
    compared[shape]++
    more = count[key, "ncu"] - count[key, "emulator"]
    if (more == 0) {
      equal[shape]++
      continue
    }
    why = explained(part[1], part[2], part[3], part[4], part[5], counter, more)
    if (why == "" && ((key "|" more) in open)) why = "open"
    if (why == "") {
      why = "NOT EXPLAINED"
      failed = 1
    }
    lines[shape] = lines[shape] sprintf("    %s, %s: emulator %d, ncu %d: %s\n", part[1], counter,
      count[key, "emulator"], count[key, "ncu"], why)
  }
  for (i = 1; i <= number; i++)
    printf "  %s: %d of %d counts are equal\n%s", shapes[i], equal[shapes[i]], compared[shapes[i]], lines[shapes[i]]
  exit failed
}

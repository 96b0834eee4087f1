# SPDX-License-Identifier: MIT
# Compares the emulator's counts with ncu's, problem by problem. Input: lines "tile STEP Br 64" for Br,
# Bc and the warps of a block, "line STEP store_part 41" for the line of a source, lines of truth.open, and a
# counters CSV. Exit status 1 if they differ where nothing here explains it and truth.open does not have what
# is left.
#
# Explained, and computed from the shape and from what else the emulator counts: what nvcc makes of a source.
# 1. Copies of an iteration that has none: `if (j + Bc < seqlen) load_tile(K)` is a branch at head
# dim 128; at head dim 64 a thread has four copies per tile, and ptxas puts a predicate on each
# instead (`make sass-15`: @!P1 LDGSTS). In the last iteration, of step 21 in the first, the warp issues them,
# and ncu counts them, though no lane copies. Where the predicate is P0 (steps 11 to 14), ncu's metric of
# wavefronts reads it as false (TRUTH.md) and counts them as if all lanes copied: 32 wavefronts each, 4 of them
# ideal. Where it is P1 or P2 (steps 15, 16, 20 and 21) it counts none. A warp of a block has Bc d / 8 / threads of
# them, so all the warps of all the blocks have batch heads (seqlen / Br) (Bc d / 8 / 32), less those of
# blocks that see no key.
# 2. In step 12 at head dim 128 the next fragment's ldmatrix has a predicate, which is off once in
# each iteration of each warp.
# 3. Before the copies of a tile, ptxas puts three loads that are switched off for good (`make sass-24`:
# @!PT LDS), before a fence four (`make sass-26`). ncu counts them as requests. (Of steps without any other load
# ncu.awk leaves them out.) In step 24 a warp comes by two such places per tile of K, and votes once, and by one
# before Q's copies. That is the only one in steps 25 and 26, of each warp that copies: of as many as Q has 256
# elements, or of all. In steps 26 and 29 one warp of a block passes two fences, if there are splits: the warp that
# counts the block, by an atomic.
# 4. In step 22 a block whose sequence has no row for it leaves, and nvcc puts the load of the keys' number
# after that.
# 5. In step 26 the 16 bytes of a part that a lane stores are not in neighbouring registers: nvcc makes it four
# stores of 4 bytes (`make sass-26`: STG.E), each of which touches all the sectors. So it is in step 29 where Q is
# put into shared memory, rotated or not (`make sass-29`: STS): four wavefronts for each 4 bytes of lanes that
# are 16 bytes apart.
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
  line = options
  sub(/^.*,/, "", line)
  sub(/,[^,]*$/, "", options)
  gsub("\"", "", options)
  problem = $1 "|" $3 "|" $4 "|" $5 "|" $6 "|" options
  value = substr(part[n], 2)
  if (line != "0") {
    of_line[problem, line, part[n - 1]] = value
    next
  }
  key = problem "|" part[n - 1]
  if (!(key in known)) order[++keys] = key
  known[key] = 1
  count[key, $2] = value
}

# The blocks of a step: a tile of queries each.
function blocks(step, batch, heads, seqlen) {
  return batch * heads * int((seqlen + tile[step, "Br"] - 1) / tile[step, "Br"])
}

# Those that leave at once, where sequences have lengths.
function left(step, heads, seqlen, options,  list, lengths, n, i, with_rows) {
  if (!match(options, /lengths=[0-9,:]+/)) return 0
  list = substr(options, RSTART + 8, RLENGTH - 8)
  n = split(list, lengths, ",")
  for (i = 1; i <= n; i++) with_rows += blocks(step, 1, heads, lengths[i])
  return blocks(step, n, heads, seqlen) - with_rows
}

# Those that see no key: of causal queries before the first key.
function without_keys(step, batch, heads, seqlen, options,  keys) {
  if (options !~ /causal/ || !match(options, /seqlen-k=[0-9]+/)) return 0
  keys = substr(options, RSTART + 9, RLENGTH - 9)
  return keys < seqlen ? batch * heads * int((seqlen - keys) / tile[step, "Br"]) : 0
}

# The tiles of the rows of Q that share a head of K and V. Without splits each is a block.
function row_tiles(step, batch, heads, seqlen, options,  kv_heads) {
  kv_heads = match(options, /kv-heads=[0-9]+/) ? substr(options, RSTART + 9, RLENGTH - 9) : heads
  return batch * kv_heads * int((seqlen * heads / kv_heads + tile[step, "rows"] - 1) / tile[step, "rows"])
}

# How much more ncu counts by the rules above; says why in `reason`.
function explained(problem, counter,  part, step, d, all, unseeing, off, copies, splits, there, warps, line, stores, place) {
  split(problem, part, "|")
  step = part[1]
  d = part[5]
  all = blocks(step, part[2], part[3], part[4])
  unseeing = without_keys(step, part[2], part[3], part[4], part[6])
  reason = "switched off"
  if (step ~ /^12-/ && d == 128 && counter ~ /^(ldmatrix|shared load requests)$/)
    return all * tile[step, "warps"] * part[4] / tile[step, "Bc"]
  if (step ~ /^(1[1-6]|2[01])-/ && d == 64) {
    off = (all - unseeing) * tile[step, "Bc"] * d / 8 / 32
    if (counter == "cp.async requests") return off
    if (step ~ /^(15|16|20|21)-/) return 0
    reason = off " switched off, 32 each"
    if (counter == "cp.async wavefronts") return 32 * off
    reason = off " switched off, 4 each"
    if (counter == "shared wavefronts, ideal") return 4 * off
  }
  if (counter == "shared load requests") {
    if (step ~ /^24-/) return 3 * (2 * count[problem "|votes", "emulator"] + all * tile[step, "warps"])
    if (step ~ /^29-/) return 2 * 4 * count[problem "|atomics", "emulator"]
    if (step ~ /^2[56]-/) {
      copies = d * tile[step, "rows"] / 256
      splits = count[problem "|atomics", "emulator"] + 0  # of all tiles; none where a tile has but one
      there = splits ? splits : row_tiles(step, part[2], part[3], part[4], part[6])
      # A block has four barriers if there are splits, and two otherwise.
      warps = count[problem "|block barriers", "emulator"] / there / (splits ? 4 : 2)
      return 3 * (copies < warps ? copies : warps) * there + 2 * 4 * splits
    }
  }
  if (step ~ /^22-/ && counter ~ /^global (load (requests|sectors)|bytes read)$/) {
    reason = "not loaded by blocks that leave"
    return -left(step, part[3], part[4], part[6]) * tile[step, "warps"] * (counter ~ /bytes/ ? 32 : 1)
  }
  if (step ~ /^26-/ && counter ~ /^global (store (requests|sectors)|bytes written)$/) {
    reason = "a part's 16 bytes in four stores"
    stores = of_line[problem, "store_part", counter ~ /requests/ ? counter : "global store sectors"]
    return 3 * stores * (counter ~ /bytes/ ? 32 : 1)
  }
  if (step ~ /^29-/ && counter ~ /^shared store (requests|wavefronts)$/) {
    reason = "16 bytes of Q in four stores"
    for (place = 1; place <= 2; place++)
      stores += of_line[problem, "store_rotated_" place, "shared store requests"]
    return (counter ~ /requests/ ? 3 : 4 * 4 - 4) * stores
  }
  return 0
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
    problem = substr(key, 1, length(key) - length(counter) - 1)
    rest = more - explained(problem, counter)
    why = rest == more ? "" : reason == "switched off" ? more - rest " " reason : reason
    if (rest != 0) {
      why = why (why == "" ? "" : "; ") rest ((key "|" rest) in open ? " open" : " NOT EXPLAINED")
      if (!((key "|" rest) in open)) failed = 1
    }
    lines[shape] = lines[shape] sprintf("    %s, %s: emulator %d, ncu %d: %s\n", part[1], counter,
      count[key, "emulator"], count[key, "ncu"], why)
  }
  for (i = 1; i <= number; i++)
    printf "  %s: %d of %d counts are equal\n%s", shapes[i], equal[shapes[i]], compared[shapes[i]], lines[shapes[i]]
  exit failed
}

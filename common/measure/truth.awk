# SPDX-License-Identifier: MIT
# Compares the emulator's counts with ncu's, problem by problem. Input: lines "tile STEP Br 64" for Br,
# Bc and the warps of a block, lines of truth.open, and counters CSVs. Exit status 1 if they differ where nothing
# here explains it and truth.open does not have what is left, 2 if a rule needs a number that nobody gave.
# With all=1 every count is printed, also those that are equal or that ncu has not measured.
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
# @!PT LDS), before a fence four (`make sass-27`). ncu counts them as requests. (Of steps without any other load
# ncu.awk leaves them out.) In step 24 a warp comes by two such places per tile of K, and votes once, and by one
# before Q's copies. That is the only one in steps 25 to 27, of each warp that copies: of as many as Q has 256
# elements, or of all. In steps 27 and 50 one warp of a block passes two fences, if there are splits: the warp that
# counts the block, by an atomic.
# 4. In step 22 a block whose sequence has no row for it leaves, and nvcc puts the load of the keys' number
# after that.
# 5. In step 27 the 16 bytes of a part that a lane stores are not in neighbouring registers: nvcc makes it four
# stores of 4 bytes (`make sass-27`: STG.E), each of which touches all the sectors. So it is in step 50 where Q is
# put into shared memory, rotated or not (`make sass-50`: STS): four wavefronts for each 4 bytes of lanes that
# 16 bytes apart.
# 6. In steps 29 and 50 at head dim 192 Q's ldmatrix have a predicate that is on in the first iteration alone
# (`make sass-29`: @!P3 LDSM): a warp votes once in each iteration, and 12 are switched off in the others.
# 7. In step 29 at head dim 32 the copies of the next K have a predicate as in rule 1, P1.
# 8. A ragged tile of Q, K or V has one request for each 128 bytes of a row in which some lanes bring data and
# others zeros, or none if a request ends where the tile does. ncu's metric counts the wavefronts of both, but
# only the zeros' where the predicate that tells them apart is P0 (TRUTH.md). ptxas decides which predicate a tile's
# last rows have: so the difference is the lines of data in these requests of Q, of K or V, of both, or of all
# three, and no other number. truth.open has the number for the committed problems.
# 9. In step 29 at head dim 96 the first 32 rows of each tile of V and of the last of K have P0. A request has
# half a line, 64 bytes, of each of 8 rows: 8 wavefronts, counted as 4.
# 10. ncu's metric of TMA stores counts instructions, and those of bulk reductions with them (steps 66 and 67). That
# of their bytes does not.
BEGIN { FS = "," }

$1 ~ /^tile / {
  split($1, word, " ")
  tile[word[2], word[3]] = word[4]
  next
}
$1 ~ /^open / {
  open[substr($0, 6)] = 1
  key = substr($0, 6)
  sub(/\|-?[0-9]+$/, "", key)
  opened[key] = 1
  next
}
$1 == "step" { fields_of($0, column) }
$2 == "emulator" || $2 == "ncu" {
  # The shape and the options, the line, which is 0 for all of them, and a column for each counter.
  n = fields_of($0, field)
  problem = field[1]
  for (i = 3; i <= 7; i++) problem = problem "|" field[i]
  for (i = 9; i <= n; i++) {
    if (field[i] == "") continue
    if (field[8] != "0") {
      of_line[problem, field[8], column[i]] = field[i]
      continue
    }
    key = problem "|" column[i]
    if (!(key in known)) order[++keys] = key
    known[key] = 1
    count[key, $2] = field[i]
  }
}

# Splits a line of CSV; fields that hold a comma stand between quotes. Returns their number.
function fields_of(line, field,  part, n, i, text) {
  n = split(line, part, "\"")
  for (i = 1; i <= n; i++) {
    if (i % 2 == 0) gsub(",", "\001", part[i])
    text = text part[i]
  }
  n = split(text, field, ",")
  for (i = 1; i <= n; i++) gsub("\001", ",", field[i])
  return n
}

# A number of a step's source. Without it no rule holds: the program ends.
function of_tile(step, name) {
  if (!((step, name) in tile)) {
    print "truth.awk: nobody says how many " name " step " step " has" > "/dev/stderr"
    missing = 1
    exit 2
  }
  return tile[step, name]
}

# The number that an option has, or `otherwise`.
function option(options, name, otherwise) {
  if (!match(" " options, " " name "=[0-9]+")) return otherwise
  return substr(options, RSTART + length(name) + 1, RLENGTH - length(name) - 2) + 0
}

# The blocks of a step: a tile of queries each.
function blocks(step, batch, heads, seqlen) {
  return batch * heads * int((seqlen + of_tile(step, "Br") - 1) / of_tile(step, "Br"))
}

# Rule 8: whether ncu can have counted so many wavefronts less.
function beside_zeros(problem, less,  part, step, d, keys, Br, Bc, rows, of_q, of_k, tiles, i) {
  split(problem, part, "|")
  step = part[1]
  d = part[5]
  if (step !~ /^(2[1-9]|50)-/ || d % 64 || part[6] ~ /lengths=/ || less <= 0) return 0
  keys = option(part[6], "seqlen-k", part[4])
  # The rows of a request: 8 lanes have 128 bytes of a row in prompts of steps 29 and 50, else all of it.
  rows = step ~ /^(29|50)-/ && !decodes(step, part[4]) ? 4 : 256 / d
  if (decodes(step, part[4])) {
    of_k = row_tiles(step, part[2], part[3], part[4], part[6]) * (keys % 16 % rows)
  } else {
    Br = of_tile(step, "Br")
    Bc = step ~ /^(29|50)-/ && d == 256 ? 96 : of_tile(step, "Bc")
    tiles = int((part[4] + Br - 1) / Br)
    of_q = part[2] * part[3] * (part[4] % Br % rows)
    for (i = 0; i < tiles; i++)
      if (end_of_keys(part[4], keys, part[6], i, Br) > keys - keys % Bc)
        of_k += part[2] * part[3] * (keys % Bc % rows)
  }
  less /= d / 64
  return less == of_q || less == of_k || less == 2 * of_k || less == of_q + of_k || less == of_q + 2 * of_k
}

# Whether a step's blocks are of rows of a cache, 16 keys a tile.
function decodes(step, seqlen) { return step ~ /^2[5-7]-/ || (step ~ /^50-/ && seqlen <= 16) }

# The first key that no row of a tile of queries sees.
function end_of_keys(seqlen, keys, options, i, Br,  end) {
  end = (i + 1) * Br + keys - seqlen
  return options ~ /causal|window/ && end < keys ? end : keys
}

# Rule 9.
function half_lines(part, ideal,  keys, Br, Bc, i, tiles, rows, sum) {
  keys = option(part[6], "seqlen-k", part[4])
  Br = of_tile(part[1], "Br")
  Bc = of_tile(part[1], "Bc")
  for (i = 0; i * Br < part[4]; i++) {
    tiles = int((end_of_keys(part[4], keys, part[6], i, Br) + Bc - 1) / Bc)
    if (tiles <= 0) continue
    rows = keys - (tiles - 1) * Bc
    if (rows > 32) rows = 32
    sum += ideal ? 2 * 3 * int((rows % 8 + 1) / 2) : (tiles - 1) * 48 + 2 * 3 * (int(rows / 8) * 4 + rows % 8)
  }
  return part[2] * part[3] * sum
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
  keys = option(options, "seqlen-k", seqlen)
  return options ~ /causal/ && keys < seqlen ? batch * heads * int((seqlen - keys) / of_tile(step, "Br")) : 0
}

# The tiles of the rows of Q that share a head of K and V. Without splits each is a block.
function row_tiles(step, batch, heads, seqlen, options,  kv_heads) {
  kv_heads = option(options, "kv-heads", heads)
  return batch * kv_heads * int((seqlen * heads / kv_heads + of_tile(step, "rows") - 1) / of_tile(step, "rows"))
}

# How much more ncu counts by the rules above; says why in `reason`.
function explained(problem, counter,  part, step, d, all, unseeing, off, copies, splits, there, warps, line, stores, place) {
  split(problem, part, "|")
  step = part[1]
  d = part[5]
  reason = "switched off"
  if (counter == "TMA stores" && count[problem "|bulk reductions", "emulator"]) {
    reason = "bulk reductions"
    return count[problem "|bulk reductions", "emulator"]
  }
  if (step !~ /^(1[1-6]|2[0-9]|50)-/) return 0
  if (!decodes(step, part[4])) {
    all = blocks(step, part[2], part[3], part[4])
    unseeing = without_keys(step, part[2], part[3], part[4], part[6])
  }
  if (step ~ /^(29|50)-/ && d == 192 && counter ~ /^(ldmatrix|shared load requests)$/ && !decodes(step, part[4]))
    return 12 * (count[problem "|votes", "emulator"] - 8 * (all - unseeing))
  if (step ~ /^29-/ && d == 32 && counter == "cp.async requests")
    return (all - unseeing) * of_tile(step, "Bc") * d / 8 / 32
  if (step ~ /^29-/ && d == 96 && counter ~ /^(cp.async wavefronts|shared wavefronts, ideal)$/ &&
      part[6] !~ /lengths|window/) {
    reason = "half lines of data with P0"
    return -half_lines(part, counter ~ /ideal/)
  }
  if (step ~ /^12-/ && d == 128 && counter ~ /^(ldmatrix|shared load requests)$/)
    return all * of_tile(step, "warps") * part[4] / of_tile(step, "Bc")
  if (step ~ /^(1[1-6]|2[01])-/ && d == 64) {
    off = (all - unseeing) * of_tile(step, "Bc") * d / 8 / 32
    if (counter == "cp.async requests") return off
    if (step ~ /^(15|16|20|21)-/) return 0
    reason = off " switched off, 32 each"
    if (counter == "cp.async wavefronts") return 32 * off
    reason = off " switched off, 4 each"
    if (counter == "shared wavefronts, ideal") return 4 * off
  }
  if (counter == "shared load requests") {
    if (step ~ /^24-/) return 3 * (2 * count[problem "|votes", "emulator"] + all * of_tile(step, "warps"))
    if (step ~ /^50-/) return 2 * 4 * count[problem "|atomics", "emulator"]
    if (step ~ /^2[5-7]-/) {
      copies = d * of_tile(step, "rows") / 256
      splits = count[problem "|atomics", "emulator"] + 0  # of all tiles; none where a tile has but one
      there = splits ? splits : row_tiles(step, part[2], part[3], part[4], part[6])
      # A block has four barriers if there are splits, and two otherwise.
      warps = count[problem "|block barriers", "emulator"] / there / (splits ? 4 : 2)
      return 3 * (copies < warps ? copies : warps) * there + 2 * 4 * splits
    }
  }
  if (step ~ /^22-/ && counter ~ /^global (load (requests|sectors)|bytes read)$/) {
    reason = "not loaded by blocks that leave"
    return -left(step, part[3], part[4], part[6]) * of_tile(step, "warps") * (counter ~ /bytes/ ? 32 : 1)
  }
  if (step ~ /^27-/ && counter ~ /^global (store (requests|sectors)|bytes written)$/) {
    reason = "a part's 16 bytes in four stores"
    stores = of_line[problem, "store_part", counter ~ /requests/ ? counter : "global store sectors"]
    return 3 * stores * (counter ~ /bytes/ ? 32 : 1)
  }
  if (step ~ /^50-/ && counter ~ /^shared store (requests|wavefronts)$/) {
    reason = "16 bytes of Q in four stores"
    for (place = 1; place <= 2; place++)
      stores += of_line[problem, "store_rotated_" place, "shared store requests"]
    return (counter ~ /requests/ ? 3 : 4 * 4 - 4) * stores
  }
  return 0
}

END {
  if (missing) exit 2
  for (i = 1; i <= keys; i++) {
    key = order[i]
    split(key, part, "|")
    counter = part[7]
    shape = "batch " part[2] ", heads " part[3] ", seqlen " part[4] ", head dim " part[5] \
      (part[6] == "" ? "" : ", " part[6])
    if (!((key, "emulator") in count) || (!all && !((key, "ncu") in count))) continue
    if (!(shape in compared)) shapes[++number] = shape
    compared[shape] += (key, "ncu") in count
    if (!((key, "ncu") in count)) {
      lines[shape] = lines[shape] sprintf("    %s, %s: emulator %d\n", part[1], counter, count[key, "emulator"])
      continue
    }
    more = count[key, "ncu"] - count[key, "emulator"]
    if (more == 0) {
      equal[shape]++
      if (all) say(shape, part[1], counter, key, "equal")
      continue
    }
    problem = substr(key, 1, length(key) - length(counter) - 1)
    rest = more - explained(problem, counter)
    why = rest == more ? "" : reason == "switched off" ? more - rest " " reason : reason
    if (rest != 0) {
      why = why (why == "" ? "" : "; ")
      ruled = counter ~ /^(cp.async wavefronts|shared wavefronts, ideal)$/ && beside_zeros(problem, -rest)
      if (key in opened ? (key "|" rest) in open : ruled)
        why = why rest (ruled ? " data beside zeros, with P0" : " open")
      else {
        why = why rest " NOT EXPLAINED"
        failed = 1
      }
    }
    say(shape, part[1], counter, key, why)
  }
  for (i = 1; i <= number; i++)
    printf "  %s: %s\n%s", shapes[i], verdict(shapes[i]), lines[shapes[i]]
  exit failed
}

function verdict(shape) {
  return compared[shape] ? equal[shape] + 0 " of " compared[shape] " counts are equal" : "not measured"
}

function say(shape, step, counter, key, why) {
  lines[shape] = lines[shape] sprintf("    %s, %s: emulator %d, ncu %d: %s\n", step, counter,
    count[key, "emulator"], count[key, "ncu"], why)
}

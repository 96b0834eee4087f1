# SPDX-License-Identifier: MIT
# What each kernel takes, and how many of its blocks fit a multiprocessor: a line a kernel.
# Input: for each step a file STEP.txt, its PTX and then what ptxas -v says of it, both demangled.
# Variable: arch. PTX has the threads of a block (__launch_bounds__) and, in a comment that
# shared_storage() of common/kernel/kernel.h leaves there, the bytes of shared memory that the launch asks
# for; ptxas has the rest. Ends with status 1 where ptxas gives up the overlap that Part IV is about: where
# it serialises wgmma, waits for it of its own accord, or ignores setmaxnreg; or where for Hopper a kernel of
# step 30 or a later one spills.
BEGIN {
  # CUDA C++ Programming Guide, 'Technical Specifications per Compute Capability': resident warps,
  # resident blocks and KB of shared memory of a multiprocessor. All have 65536 registers.
  limits["75"] = "32 16 64"
  limits["80"] = "64 32 164"
  limits["86"] = "48 16 100"
  limits["87"] = "48 16 164"
  limits["89"] = "48 24 100"
  limits["90"] = "64 32 228"
  name = arch
  gsub(/[^0-9]/, "", arch)
  split(limits[arch], limit, " ")
}

function up(value, multiple) { return int((value + multiple - 1) / multiple) * multiple }

# The last field that begins with `word`, or 0.
function field(word,  i) {
  for (i = NF; i > 0 && index($i, word) != 1; i--);
  return i
}

# "00-scores <64>", as a key that both parts of the input have.
function kernel_of(text) {
  gsub(/\(anonymous namespace\)::|void |'/, "", text)
  gsub(/> >/, ">>", text)
  sub(/\(.*/, "", text)
  return step SUBSEP text
}

FNR == 1 {
  step = FILENAME
  gsub(/.*\/|\.txt$/, "", step)
}
# ptxas has no warnings for these, only infos, so -Werror does not see them.
/^ptxas .*(Potential Performance Loss|warpgroup\.[a-z]+ is injected)/ {
  sub(/^ptxas [a-z]* *: /, "")
  complain(step ": ptxas says: " $0)
  next
}
/\.entry/ {
  sub(/.*\.entry /, "")
  kernel = kernel_of($0)
  order[++kernels] = kernel
}
/^\.maxntid/ {
  gsub(",", "")
  threads[kernel] = $2 * $3 * $4
}
/\/\/ shared memory:/ { dynamic[kernel] = $NF }
/Function properties for/ {
  sub(/.*properties for /, "")
  kernel = kernel_of($0)
}
/spill stores/ {
  stored[kernel] = $(NF - 7)
  loaded[kernel] = $(NF - 3)
}
# What sass.awk says: a kernel, then one of its loops.
/^\(anonymous namespace\)::/ { kernel = kernel_of($0) }
/^  a loop of / && $4 + 0 > loop[kernel] { loop[kernel] = $4 + 0 }
/Used .* registers/ {
  registers[kernel] = $(field("registers") - 1)
  static[kernel] = field("smem") ? $(field("smem") - 2) : 0
}

function complain(text) {
  print "make regs: " text > "/dev/stderr"
  complaints++
}

# Sets `blocks`, how many fit a multiprocessor, and `by`, what does not suffice for one more. The
# units of allocation are those of the toolkit's cuda_occupancy.h: a warp's registers come in 256s
# from its quarter of the multiprocessor, a block's shared memory in 128 bytes (before sm_80: 256),
# and 1 KB more of it goes to the system from sm_80 on.
function fit(kernel, warps,  shared) {
  shared = static[kernel] + dynamic[kernel] + (arch >= 80 ? 1024 : 0)
  blocks = limit[2]
  by = "blocks"
  at_most(int(limit[1] / warps), "warps")
  at_most(int(4 * int(16384 / up(32 * registers[kernel], 256)) / warps), "registers")
  if (shared) at_most(int(1024 * limit[3] / up(shared, arch >= 80 ? 128 : 256)), "shared memory")
}
function at_most(count, what) {
  if (count >= blocks) return
  blocks = count
  by = what
}

# The kernel of each step and head dim that has the longest loop. The head dim is the first number that is an argument
# of its template, and 128 where that has none. (Names of types have digits, too: __nv_bfloat16, e4m3.)
function write_csv(  i, part, d, key, keys, longest) {
  for (i = 1; i <= kernels; i++) {
    if (!loop[order[i]]) continue
    split(order[i], part, SUBSEP)
    d = match(part[2], /[<, ][0-9]+/) ? substr(part[2], RSTART + 1, RLENGTH - 1) : 128
    key = part[1] "," d
    if (!(key in longest)) keys[++keys[0]] = key
    if (loop[order[i]] > loop[longest[key]]) longest[key] = order[i]
  }
  print "step,head_dim,registers,instructions" > csv
  for (i = 1; i <= keys[0]; i++) print keys[i] "," registers[longest[keys[i]]] "," loop[longest[keys[i]]] > csv
}

END {
  if (csv) write_csv()
  row = "%-22s %-37s %10s %10s %7s %6s  %-14s %6s %6s%s\n"
  printf row, "for " name, "", "registers", "shared KB", "blocks", "warps", "", "spill", "spill", ""
  printf row, "step", "kernel", "per thread", "per block", "per SM", "per SM", "limited by", "stores", "loads", ""
  for (i = 1; i <= kernels; i++) {
    kernel = order[i]
    split(kernel, part, SUBSEP)
    warps = up(threads[kernel], 32) / 32
    blocks = "?"
    by = limit[1] ? "(no bounds)" : "(" name ")"
    if (warps && limit[1]) fit(kernel, warps)
    printf row, part[1], part[2], registers[kernel],
      sprintf("%.1f", (static[kernel] + dynamic[kernel]) / 1024),
      blocks, blocks == "?" ? "?" : blocks * warps, by, stored[kernel], loaded[kernel],
      stored[kernel] + loaded[kernel] ? "  SPILLS" : ""
    if (arch >= 90 && part[1] + 0 >= 30 && stored[kernel] + loaded[kernel])
      complain(part[1] ": " part[2] " spills, and from step 30 on no kernel for Hopper may")
  }
  exit complaints > 0
}

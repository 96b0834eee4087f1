# SPDX-License-Identifier: MIT
# Reads the headers of the steps and writes the table that everything else reads, build/ladder.csv:
#
#   // Needs       sm_80: cp.async, mma.m16n8k16     the oldest GPU, and why
#   // Takes       --causal, --type fp8              on as many lines as it takes
#   // Before      step 16: every query sees every key.
#
# Input: the sources. -v arch="sm_80 sm_90": the column 'archs' has those that the source is
# compiled for: all that are new enough. A source that needs sm_90a, which is one chip's, is
# compiled for it where arch has sm_90.
BEGIN { print "\"step\",\"needs\",\"why\",\"takes\",\"before\",\"archs\"" }
FNR == 1 {
  finish()
  name = FILENAME
  sub(/\/attention\.cu$|\.cu$/, "", name)
  sub(/.*\//, "", name)
  in_header = 1
}
/^[^\/]/ { in_header = in_takes = 0 }
!in_header { next }
/^\/\/ [A-Z]/ { in_takes = $2 == "Takes" }
/^\/\/ Needs / {
  needs = $3
  sub(/:$/, "", needs)
  if (index($0, ":")) why = substr($0, index($0, ":") + 2)
}
/^\/\/ Before +step / { before = substr($4, 1, 2) }
in_takes {
  for (i = $2 == "Takes" ? 3 : 2; i <= NF; i++) takes = takes (takes ? " " : "") $i
  gsub(",", "", takes)
}
END { finish() }

function finish() {
  if (name == "") return
  if (needs == "") {
    print name ": the header has no '// Needs  sm_NN'" > "/dev/stderr"
    name = ""
    exit 1
  }
  printf "\"%s\",\"%s\",\"%s\",\"%s\",\"%s\",\"%s\"\n", name, needs, why, takes, before, archs()
  needs = why = takes = before = ""
}

function archs(  all, count, i, list, seen) {
  count = split(arch, all, " ")
  for (i = 1; i <= count; i++) {
    if (number(all[i]) < number(needs)) continue
    if (needs ~ /[a-z]$/) {
      if (number(all[i]) > number(needs)) continue
      all[i] = needs
    }
    if (seen[all[i]]++) continue
    list = list (list ? " " : "") all[i]
  }
  return list
}

function number(name) {
  gsub(/[^0-9]/, "", name)
  return name + 0
}

# What the headers of the steps say: "// Needs  sm_80: cp.async, mma.m16n8k16", "// Takes  --causal".
# Input: the sources. As lines of ladder.inc, which the program includes: name, needs, why, takes.
# With -v arch="sm_80 sm_90" as words for the Makefile, NAME:NEEDS:TAKES:ARCH,ARCH: those of arch that
# the step is compiled for. They are those that are new enough; a step that needs sm_90a, which is one
# chip's, is compiled for it where arch has sm_90.
FNR == 1 {
  finish()
  name = FILENAME
  sub(/\/attention\.cu$|\.cu$/, "", name)
  sub(/.*\//, "", name)
}
/^\/\/ Needs / {
  needs = $3
  sub(/:$/, "", needs)
  if (index($0, ":")) why = substr($0, index($0, ":") + 2)
}
/^\/\/ [A-Z]/ { in_takes = $2 == "Takes" }
/^[^\/]/ { in_takes = 0 }
in_takes {  # on as many lines as it takes
  for (i = $2 == "Takes" ? 3 : 2; i <= NF; i++) takes = takes (takes ? " " : "") $i
  gsub(",", "", takes)
}
END { finish() }

function finish() {
  if (name == "") return
  if (needs == "") {
    print name ": the header has no '// Needs  sm_NN'" > "/dev/stderr"
    exit 1
  }
  if (arch == "") {
    printf "{\"%s\", \"%s\", \"%s\", \"%s\"},\n", name, needs, why, takes
  } else {
    gsub(" ", ",", takes)
    print name ":" needs ":" (takes ? takes : "nothing") ":" compiled_for()
  }
  needs = why = takes = ""
}

function compiled_for(  all, count, i, list, seen) {
  count = split(arch, all, " ")
  for (i = 1; i <= count; i++) {
    if (number(all[i]) < number(needs)) continue
    if (needs ~ /[a-z]$/) {
      if (number(all[i]) > number(needs)) continue
      all[i] = needs
    }
    if (seen[all[i]]++) continue
    list = list (list ? "," : "") all[i]
  }
  return list
}

function number(name) {
  gsub(/[^0-9]/, "", name)
  return name + 0
}

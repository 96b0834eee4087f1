# SPDX-License-Identifier: MIT
# Makes one row of each problem: a counters CSV with a column for each counter. Input: rows as --profile-csv writes them,
# a counter each: step,source,batch,heads,seqlen,head_dim,options,line,"COUNTER",VALUE. Exit status 1 if one has two
# values.
BEGIN { FS = "\"" }
$0 !~ /^[0-9]/ { next }
{
  # Options that hold a comma stand between quotes, too.
  name = $(NF - 1)
  problem = substr($0, 1, length($0) - length(name) - length($NF) - 3)
  if ((problem, name) in value && value[problem, name] != substr($NF, 2)) {
    print "problems.awk: two values of '" name "' at " problem > "/dev/stderr"
    exit failed = 1
  }
  value[problem, name] = substr($NF, 2)
  if (!(problem in known)) problems[++number] = problem
  known[problem] = 1
  # A new column comes after that of the row before, or last.
  if (problem != before_problem) before = ""
  if (!(name in column)) {
    column[name] = before == "" ? columns : column[before]
    for (i = columns++; i > column[name]; i--) column[names[i + 1] = names[i]] = i + 1
    names[++column[name]] = name
  }
  before_problem = problem
  before = name
}
END {
  if (failed) exit 1
  printf "step,source,batch,heads,seqlen,head_dim,options,line"
  for (i = 1; i <= columns; i++) printf ",\"%s\"", names[i]
  print ""
  for (k = 1; k <= number; k++) {
    printf "%s", problems[k]
    for (i = 1; i <= columns; i++) printf ",%s", (problems[k], names[i]) in value ? value[problems[k], names[i]] : ""
    print ""
  }
}

# SPDX-License-Identifier: MIT
# The loops of each kernel in what `nvdisasm -c` prints: the instructions from a label to the jump back
# to it, by kind, the most frequent first. Loops of less than 100 instructions are left out.
/^\.text\./ || /\.section[ \t]+\.text\./ {
  kernel = $0
  sub(/^.*\.text\./, "", kernel)
  sub(/[:,].*/, "", kernel)
  at = 0
}
/^\.L_x_[0-9]+:/ {
  label = $1
  sub(":", "", label)
  where[label] = at
}
/^[ \t]*\/\*[0-9a-f]+\*\// {
  text = $0
  sub(/^[ \t]*\/\*[0-9a-f]+\*\/[ \t]*/, "", text)
  sub(/;.*/, "", text)
  predicate = text ~ /^@/
  sub(/^@!?U?P[0-9T]+[ \t]+/, "", text)
  split(text, word, /[ \t]+/)
  name = word[1]
  sub(/\..*/, "", name)
  kind[at++] = (predicate && name != "BRA" ? "@" : "") name
  if (name == "BRA" && match(text, /\.L_x_[0-9]+/)) {
    label = substr(text, RSTART, RLENGTH)
    if ((label in where) && at - where[label] >= 100) loop(where[label], at)
  }
}
function loop(from, to,  i, count, kinds, names, most, line) {
  for (i = from; i < to; i++) if (count[kind[i]]++ == 0) names[++kinds] = kind[i]
  line = sprintf("%s\n  a loop of %d instructions:", kernel, to - from)
  for (; kinds > 0; kinds--) {
    most = 1
    for (i = 2; i <= kinds; i++) if (count[names[i]] > count[names[most]]) most = i
    line = line sprintf(" %d %s", count[names[most]], names[most])
    names[most] = names[kinds]
  }
  print line
}

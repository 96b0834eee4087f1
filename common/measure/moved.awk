# SPDX-License-Identifier: MIT
# moved.awk file=1 AFTER file=2 HEADERS file=3 BEFORE: BEFORE without what only moved: four lines or more that follow each other there and in
# HEADERS, and stand no longer in AFTER. Spaces do not count. The last line says how many they are.
function plain(line) { gsub(/[ \t]+/, "", line); return line }
file == 1 { after = after plain($0) "\n" }
file == 2 { held = held plain($0) "\n" }
file == 3 { line[++lines] = $0 }
END {
  after = "\n" after
  held = "\n" held
  for (i = 1; i <= lines; i += count) {
    text = "\n"
    for (count = 0; i + count <= lines; count++) {
      if (!index(held, text plain(line[i + count]) "\n")) break
      text = text plain(line[i + count]) "\n"
    }
    while (count > 0 && plain(line[i + count - 1]) == "") count--  # a blank line between two functions stays
    if (count >= 4 && !index(after, text)) moved += count
    else {
      count = 1
      print line[i]
    }
  }
  print moved + 0 >"/dev/stderr"
}

// SPDX-License-Identifier: MIT
#include "common/testing/mutants.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <set>
#include <string_view>

namespace {

/// A range of a source that becomes the branches of an `if`, or of a '?'.
struct Site {
  std::size_t begin, end;
  enum Kind { kStatements, kExpression, kEffect } kind;  // kEffect: an expression without a value

  bool overlaps(const Site &other) const { return begin < other.end && other.begin < end; }
  bool holds(const Site &other) const { return begin <= other.begin && other.end <= end; }
  bool operator==(const Site &other) const = default;
};

/// Which change a site belongs to.
struct Choice {
  Site site;
  std::size_t change;
};

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

/// As much of C++ as it takes to find the statement or the expression that a text is in.
class Code {
 public:
  explicit Code(const std::string &source);

  /// The smallest site around [begin, end), if there is one.
  std::optional<Site> site_of(std::size_t begin, std::size_t end) const;

 private:
  static constexpr std::size_t kNone = std::string::npos;
  using Range = std::pair<std::size_t, std::size_t>;

  std::size_t before(std::size_t at) const;  // the last code before it
  std::size_t after(std::size_t at) const;   // the first code from there on
  std::string_view word_before(std::size_t at) const;
  std::string_view word_at(std::size_t at) const;
  std::size_t enclosing(std::size_t begin, std::size_t end) const;
  bool is_block(std::size_t brace) const;
  bool is_scope(std::size_t brace) const;
  bool declares(std::size_t at) const;
  std::vector<Range> statements_of(std::size_t brace) const;
  Range part_of(std::size_t open, std::size_t begin, std::size_t end, std::string_view ends) const;
  std::optional<Site> in_header(std::size_t open, std::size_t begin, std::size_t end) const;
  std::optional<Site> in_declaration(Range statement, std::size_t begin, std::size_t end) const;

  std::string text_;                // comments, strings and lines of the preprocessor are blank
  std::vector<std::size_t> match_;  // of each bracket the other
  std::vector<bool> in_comment_;
};

Code::Code(const std::string &source)
    : text_(source), match_(source.size(), kNone), in_comment_(source.size()) {
  bool line_begins = true;
  for (std::size_t i = 0; i < source.size(); i++) {
    std::size_t end = i;
    if (source.compare(i, 2, "//") == 0 || (line_begins && source[i] == '#')) {
      end = std::min(source.find('\n', i), source.size());
      std::fill(in_comment_.begin() + static_cast<std::ptrdiff_t>(i),
                in_comment_.begin() + static_cast<std::ptrdiff_t>(end), true);
    } else if (source[i] == '"' || (source[i] == '\'' && (i == 0 || !is_word(source[i - 1])))) {
      for (end = i + 1; end < source.size() && source[end] != source[i]; end++)
        end += source[end] == '\\';
      i++;  // the quotes stay
    }
    for (; i < end; i++) text_[i] = ' ';
    if (i < source.size() && source[i] != ' ') line_begins = source[i] == '\n';
  }
  std::vector<std::size_t> open;
  for (std::size_t i = 0; i < text_.size(); i++) {
    const char c = text_[i];
    // The style has no space before the '<' of a template, and one before that of a comparison.
    const bool angle = c == '<' && i > 0 &&
                       (is_word(text_[i - 1]) || word_before(i) == "template") &&
                       text_[std::min(i + 1, text_.size() - 1)] != '<';
    if (c == '(' || c == '[' || c == '{' || angle) open.push_back(i);
    if (c == '>' && (open.empty() || text_[open.back()] != '<' || text_[i - 1] == '-')) continue;
    if (c != ')' && c != ']' && c != '}' && c != '>') continue;
    while (c != '>' && !open.empty() && text_[open.back()] == '<') open.pop_back();
    if (open.empty()) continue;
    match_[i] = open.back(), match_[open.back()] = i;
    open.pop_back();
  }
}

std::size_t Code::before(std::size_t at) const {
  while (at > 0 && std::isspace(static_cast<unsigned char>(text_[at - 1]))) at--;
  return at == 0 ? kNone : at - 1;
}

std::size_t Code::after(std::size_t at) const {
  while (at < text_.size() && std::isspace(static_cast<unsigned char>(text_[at]))) at++;
  return at;
}

std::string_view Code::word_before(std::size_t at) const {
  const std::size_t last = before(at);
  if (last == kNone || !is_word(text_[last])) return {};
  std::size_t first = last;
  while (first > 0 && is_word(text_[first - 1])) first--;
  return std::string_view(text_).substr(first, last + 1 - first);
}

std::string_view Code::word_at(std::size_t at) const {
  std::size_t end = at;
  while (end < text_.size() && is_word(text_[end])) end++;
  return std::string_view(text_).substr(at, end - at);
}

/// The innermost bracket that opens before the range and closes behind it.
std::size_t Code::enclosing(std::size_t begin, std::size_t end) const {
  for (std::size_t i = begin; i-- > 0;)
    if (match_[i] != kNone && match_[i] >= end) return i;
  return kNone;
}

/// Whether a '{' begins statements; else it begins values or declarations.
bool Code::is_block(std::size_t brace) const {
  const std::size_t last = before(brace);
  if (last == kNone) return false;
  if (text_[last] == ')' || text_[last] == ';' || text_[last] == '{' || text_[last] == '}')
    return true;
  if (text_[last] == ']')
    return text_[brace - 1] == ' ';  // a lambda's; an array's values follow it
  const std::string_view word = word_before(brace);
  return word == "else" || word == "do" || word == "const" || word == "mutable";
}

/// Whether a '{' begins the members of a class or of a namespace.
bool Code::is_scope(std::size_t brace) const {
  std::size_t begin = brace;
  while (begin > 0 && text_[begin - 1] != ';' && text_[begin - 1] != '{' && text_[begin - 1] != '}')
    begin--;
  begin = after(begin);
  if (word_at(begin) == "template") begin = after(match_[after(begin + 8)] + 1);
  const std::string_view word = word_at(begin);
  return word == "struct" || word == "class" || word == "union" || word == "enum" ||
         word == "namespace";
}

/// Whether the statement there is a declaration: it begins with a type, and a name.
bool Code::declares(std::size_t at) const {
  static const std::set<std::string_view> always = {"const", "constexpr", "static",  "auto",
                                                    "using", "struct",    "alignas", "unsigned"};
  static const std::set<std::string_view> never = {"return", "else", "if",     "for", "while",
                                                   "do",     "goto", "switch", "case"};
  const std::string_view word = word_at(at);
  if (always.contains(word)) return true;
  if (word.empty() || never.contains(word)) return false;
  while (at < text_.size() && (is_word(text_[at]) || text_[at] == ':')) at++;
  if (text_[at] == '<' && match_[at] != kNone) at = match_[at] + 1;
  const std::size_t type_end = at;
  while (text_[at] == ' ' || text_[at] == '*' || text_[at] == '&') at++;
  return at > type_end && is_word(text_[at]);
}

std::vector<Code::Range> Code::statements_of(std::size_t brace) const {
  std::vector<Range> statements;
  const std::size_t close = match_[brace];
  for (std::size_t begin = after(brace + 1); begin < close;) {
    std::size_t end = begin;
    for (bool ended = false; !ended && end < close;) {
      const char c = text_[end];
      const bool block = c == '{' && is_block(end);
      end = match_[end] != kNone && match_[end] > end ? match_[end] + 1 : end + 1;
      if (c != ';' && !block) continue;
      const std::string_view next = word_at(after(end));
      const bool lambda = block && text_[after(end)] != '}' &&
                          (text_[after(end)] == ';' || text_[after(end)] == ')' ||
                           text_[after(end)] == '(' || text_[after(end)] == ',');
      ended = next != "else" && !lambda && !(block && word_at(begin) == "do" && next == "while");
    }
    statements.push_back({begin, end});
    begin = after(end);
  }
  return statements;
}

/// Of what is within brackets, the part between two of these characters that holds the range; empty if one of them
/// is in the range.
Code::Range Code::part_of(std::size_t open, std::size_t begin, std::size_t end,
                          std::string_view ends) const {
  Range part = {open + 1, match_[open]};
  for (std::size_t i = open + 1; i < match_[open]; i++) {
    if (match_[i] != kNone && match_[i] > i) {
      i = match_[i];
    } else if (ends.find(text_[i]) != kNone) {
      if (i >= begin && i < end) return {};
      if (i < begin) part.first = i + 1;
      if (i >= end && part.second == match_[open]) part.second = i;
    }
  }
  return {after(part.first), part.second};
}

/// In what stands in the parentheses after `if`, `while` or `for`.
std::optional<Site> Code::in_header(std::size_t open, std::size_t begin, std::size_t end) const {
  const std::string_view word = word_before(open);
  if (word == "if" || word == "while") return Site{open + 1, match_[open], Site::kExpression};
  if (word != "for") return {};
  const Range part = part_of(open, begin, end, ";");
  if (part.second == 0) return {};
  if (text_[before(part.first)] == '(') {  // for (int i = HERE;
    const std::size_t equals = text_.find(" = ", part.first);
    const Range value = part_of(open, begin, end, ";,");
    if (text_[part.second] != ';' || equals == kNone || equals + 3 > begin || value.second == 0)
      return {};
    return Site{std::max(value.first, equals + 3), value.second, Site::kExpression};
  }
  return Site{part.first, part.second,
              text_[part.second] == ';' ? Site::kExpression : Site::kEffect};
}

/// In a value of a declaration: behind its '=', or between the brackets of its variable.
std::optional<Site> Code::in_declaration(Range statement, std::size_t begin,
                                         std::size_t end) const {
  const std::string_view word = word_at(statement.first);
  if (word == "constexpr" || word == "static" || word == "using" || word == "struct") return {};
  std::size_t open = enclosing(begin, end), outer = begin;
  Range part = {0, 0};
  for (; open != kNone && open >= statement.first; open = enclosing(open, match_[open] + 1)) {
    if (text_[open] == '<' || text_[open] == '[') return {};
    if (text_[open] == '{' && is_block(open)) return {};
    if (part.second == 0) part = part_of(open, begin, end, ",");
    outer = open;
  }
  // The value behind the last '=' before it, if no ',' ends that value sooner.
  const std::size_t equals = text_.rfind(" = ", std::min(outer, begin));
  if (equals != kNone && equals > statement.first) {
    const std::size_t first = after(equals + 3);
    std::size_t last = first;
    while (last < statement.second && text_[last] != ';' && text_[last] != ',')
      last = match_[last] != kNone && match_[last] > last ? match_[last] + 1 : last + 1;
    if (first <= begin && end <= last && text_[first] != '{')
      return Site{first, last, Site::kExpression};
  }
  if (part.second == 0) return {};
  return Site{part.first, part.second, Site::kExpression};
}

std::optional<Site> Code::site_of(std::size_t begin, std::size_t end) const {
  std::size_t last = end;  // a change that ends in a comment makes one of the rest of the line
  if (end > 0 && end < in_comment_.size() && in_comment_[end - 1])
    last = std::min(text_.find('\n', end), text_.size());
  std::size_t first = after(begin);
  if (first >= last) {  // nothing but a comment: what replaces it stands between two statements
    const std::size_t open = enclosing(begin, last), previous = before(begin);
    if (open == kNone || !is_block(open) || is_scope(open)) return {};
    if (text_[previous] != ';' && text_[previous] != '{' && text_[previous] != '}') return {};
    return Site{begin, last, Site::kStatements};
  }
  const std::size_t code_begin = first;
  std::size_t code_end = before(end) + 1;
  for (bool grown = true; grown;) {  // brackets and their others
    grown = false;
    for (std::size_t i = first; i < code_end; i++)
      if (match_[i] != kNone && (match_[i] < first || match_[i] >= code_end)) {
        first = std::min(first, match_[i]), code_end = std::max(code_end, match_[i] + 1);
        grown = true;
      }
  }
  for (std::size_t from = first, to = code_end;;) {
    const std::size_t open = enclosing(from, to);
    if (open == kNone) return {};
    if (text_[open] == '<') return {};
    if (text_[open] == '(' && word_before(open) != "constexpr")
      if (const auto site = in_header(open, from, to)) return site;
    if (text_[open] == '{' && is_scope(open)) return {};
    if (text_[open] != '{' || !is_block(open)) {
      from = open, to = match_[open] + 1;
      continue;
    }
    Site site = {kNone, 0, Site::kStatements};
    for (const Range &statement : statements_of(open)) {
      if (statement.second <= from || statement.first >= to) continue;
      if (declares(statement.first)) {
        if (statement.first > from || statement.second < to) return {};
        return in_declaration(statement, code_begin, code_end);
      }
      site.begin = std::min(site.begin, statement.first);
      site.end = std::max(site.end, statement.second);
    }
    if (site.begin == kNone) return {};
    return Site{std::min(site.begin, begin), std::max(site.end, last), Site::kStatements};
  }
}

// --- weaving ---------------------------------------------------------------------------------------

/// The sites of a change, none of which overlap; nothing if it has a place that is in none.
std::vector<Site> sites_of(const Code &code, const std::vector<Replacement> &change) {
  std::vector<Site> sites;
  for (const Replacement &part : change) {
    std::optional<Site> site = code.site_of(part.at, part.at + part.size);
    for (std::size_t i = 0; site && i < sites.size();) {
      if (!site->overlaps(sites[i])) {
        i++;
        continue;
      }
      site = code.site_of(std::min(site->begin, sites[i].begin), std::max(site->end, sites[i].end));
      sites.erase(sites.begin() + static_cast<std::ptrdiff_t>(i));
      i = 0;
    }
    if (!site) return {};
    sites.push_back(*site);
  }
  return sites;
}

/// The changes without the words that both texts begin with, and the punctuation that both end in: it may be beyond
/// the expression that changes.
Changes shortened(const std::string &source, Changes changes) {
  for (auto &change : changes)
    for (Replacement &part : change) {
      while (part.size > 1 && !part.text.empty() &&
             part.text.back() == source[part.at + part.size - 1] &&
             std::string_view(" ,;{})").find(part.text.back()) != std::string_view::npos)
        part.size--, part.text.pop_back();
      std::size_t same = 0;
      while (same + 1 < part.size && same < part.text.size() &&
             part.text[same] == source[part.at + same])
        same++;
      while (same > 0 && is_word(source[part.at + same - 1])) same--;
      part = {part.at + same, part.size - same, part.text.substr(same)};
    }
  return changes;
}

class Weaver {
 public:
  Weaver(const std::string &source, const Changes &changes) : source_(source), changes_(changes) {}

  /// The range, with the choices that are in it.
  std::string range(std::size_t begin, std::size_t end, std::vector<Choice> choices) const {
    std::string text;
    while (!choices.empty()) {
      // The next site that is in no other, all changes of it, and what is within.
      const Site site =
          std::min_element(choices.begin(), choices.end(), [](const Choice &a, const Choice &b) {
            return a.site.begin != b.site.begin ? a.site.begin < b.site.begin
                                                : a.site.end > b.site.end;
          })->site;
      std::vector<Choice> here, within, beyond;
      for (const Choice &choice : choices)
        (choice.site == site ? here : site.holds(choice.site) ? within : beyond).push_back(choice);
      text += source_.substr(begin, site.begin - begin) + branches(site, here, within);
      begin = site.end;
      choices = beyond;
    }
    return text + source_.substr(begin, end - begin);
  }

 private:
  std::string branches(const Site &site, const std::vector<Choice> &here,
                       const std::vector<Choice> &within) const {
    const bool statements = site.kind == Site::kStatements;
    const std::string open = statements                   ? "{"
                             : site.kind == Site::kEffect ? "static_cast<void>("
                                                          : "(",
                      close = statements ? "}" : ")", from = line_of(site.begin);
    std::string text = statements ? "" : "(";
    for (const Choice &choice : here)
      text += (statements ? "if (mutant == " : "mutant == ") + std::to_string(choice.change) +
              (statements ? ") " : " ? ") + open + from + changed(site, changes_[choice.change]) +
              "\n" + close + (statements ? " else " : " : ");
    return text + open + from + range(site.begin, site.end, within) + "\n" + close +
           (statements ? "" : ")") + line_of(site.end);
  }

  /// What a change makes of a site.
  std::string changed(const Site &site, const std::vector<Replacement> &change) const {
    std::string text;
    std::size_t at = site.begin;
    for (const Replacement &part : change) {
      if (part.at < site.begin || part.at >= site.end) continue;
      text += source_.substr(at, part.at - at) + part.text;
      at = part.at + part.size;
    }
    return text + source_.substr(at, std::max(site.end, at) - at);
  }

  /// From here on lines have the numbers that they have from this place on.
  std::string line_of(std::size_t place) const {
    const auto begin = source_.begin();
    return "\n#line " +
           std::to_string(1 + std::count(begin, begin + static_cast<std::ptrdiff_t>(place), '\n')) +
           "\n";
  }

  const std::string &source_;
  const Changes &changes_;
};

/// The sites of all changes that can be made at run time.
std::vector<Choice> choices_of(const std::string &source, const Changes &changes,
                               const std::vector<bool> &leave_out) {
  const Code code(source);
  std::vector<Choice> choices;
  for (std::size_t i = 0; i < changes.size(); i++) {
    if (!leave_out.empty() && leave_out[i]) continue;
    const std::vector<Site> sites = sites_of(code, changes[i]);
    const bool crossed = std::any_of(sites.begin(), sites.end(), [&](const Site &site) {
      return std::any_of(choices.begin(), choices.end(), [&](const Choice &other) {
        return site.overlaps(other.site) && !site.holds(other.site) && !other.site.holds(site);
      });
    });
    if (!crossed)
      for (const Site &site : sites) choices.push_back({site, i});
  }
  return choices;
}

}  // namespace

Woven weave(const std::string &source, const Changes &all, const std::vector<bool> &leave_out) {
  const Changes changes = shortened(source, all);
  const std::vector<Choice> choices = choices_of(source, changes, leave_out);
  Woven woven = {Weaver(source, changes).range(0, source.size(), choices), {}};
  woven.lines.resize(changes.size());
  const auto line_of = [&](std::size_t at) {
    return 1 + static_cast<std::size_t>(std::count(
                   source.begin(), source.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
  };
  for (const Choice &choice : choices) {
    auto &[first, last] = woven.lines[choice.change];
    first = std::min(first ? first : source.size(), line_of(choice.site.begin));
    last = std::max(last, line_of(choice.site.end) + 1);  // brackets close on a line of their own
  }
  return woven;
}

// SPDX-License-Identifier: MIT
#include "common/pages/values.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace docs {

std::string format(double value, const std::string &how) {
  const auto printed = [](const char *as, int digits, double v) {
    char buffer[400];  // the longest double has 309 digits before the point
    std::snprintf(buffer, sizeof buffer, as, digits, v);
    return std::string(buffer + (buffer[0] == '-' && std::atof(buffer) == 0));  // not "-0"
  };
  if (how == "x") return format(value, value < 2 ? "2" : value < 10 ? "1" : "0") + "×";
  if (how == "%") return format(value, "%0");
  if (how == "%s") return format(value, value < 0.1 ? "%s2" : "%0");
  if (how == ",") {
    std::string s = printed("%.*f", 0, std::fabs(value));
    for (int i = static_cast<int>(s.size()) - 3; i > 0; i -= 3) s.insert(i, 1, ',');
    return (value < 0 && s != "0" ? "-" : "") + s;
  }
  const std::string rounding = how.substr(how.starts_with('%'));
  const std::size_t first = rounding.starts_with('s');
  if (rounding.size() != first + 1 || rounding[first] < (first ? '1' : '0') ||
      rounding[first] > '9')
    throw Error("unknown format '" + how +
                "'; allowed: 0 1 2..9 s1 s2..s9 , % %0 %1..%9 %s1 %s2..%s9 %s x");
  if (how[0] == '%') return format(100 * value, how.substr(1)) + "%";
  const int digits = how.back() - '0';
  if (how[0] != 's') return printed("%.*f", digits, value);
  const double rounded = std::atof(printed("%.*e", digits - 1, value).c_str());  // 9.999: 10.0
  const int exponent = rounded == 0 ? 0 : std::floor(std::log10(std::fabs(rounded)));
  if (exponent >= 3 && exponent >= digits - 1) return format(rounded, ",");
  return printed("%.*f", std::max(0, digits - 1 - exponent), rounded);
}

std::string count(double value) {
  return format(value, value == std::floor(value) ? "," : "s3");
}

double arithmetic(const std::string &text,
                  const std::function<double(const std::string &)> &value_of) {
  size_t at = 0;
  const auto wrong = [&] {
    return Error("no arithmetic over numbers and [keys]: '" + text + "', from '" + text.substr(at) +
                 "' on");
  };
  // Takes one of these characters; or gives '\0'.
  const auto next = [&](const std::string &allowed) {
    at = std::min(text.find_first_not_of(" \t\r\n", at), text.size());
    return at < text.size() && allowed.find(text[at]) != allowed.npos ? text[at++] : '\0';
  };
  const std::function<double(int)> value = [&](int level) {  // 0 a sum, 1 a product, 2 a factor
    if (level < 2) {
      double a = value(level + 1);
      while (const char operation = next(level == 0 ? "+-" : "*/")) {
        const double b = value(level + 1);
        a = operation == '+' ? a + b : operation == '-' ? a - b : operation == '*' ? a * b : a / b;
      }
      return a;
    }
    if (next("-")) return -value(2);
    if (next("(")) {
      const double sum = value(0);
      if (next(")")) return sum;
    } else if (next("[")) {
      const size_t begin = at;
      while (at < text.size() && text[at] != ']') {
        const size_t word = text.rfind(' ', at) + 1;  // a filter may have brackets: step~^2[0-4]-
        const bool in_filter = text.substr(word, at - word).find('~') != text.npos;
        if (text[at] == '[' && in_filter) at = std::min(text.find(']', at), text.size() - 1);
        at++;
      }
      if (next("]")) return value_of(text.substr(begin, at - 1 - begin));
    } else if (std::isdigit(text[at])) {
      char *end = nullptr;
      const double number = std::strtod(&text[at], &end);
      at = end - text.data();
      return number;
    }
    throw wrong();
  };
  const double v = value(0);
  if (next(""), at < text.size()) throw wrong();
  if (!std::isfinite(v)) throw Error("division by zero in '" + text + "'");
  return v;
}

}  // namespace docs

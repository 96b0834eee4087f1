// The measured values that the pages quote: the CSV files of plots/results, and arithmetic over them.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace docs {

/// A mistake of the author's: the message says what is wrong and what is allowed.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Strings = std::vector<std::string>;
using Row = std::map<std::string, std::string>;  // column -> field
using Rows = std::vector<const Row *>;

std::string trim(const std::string &s);
Strings split(const std::string &s, const std::string &separator);
Strings words(const std::string &s);
std::string join(const Strings &pieces, const std::string &separator);
std::string read_text(const std::filesystem::path &path);

std::string significant(double value, int digits);  // and no exponent: 0.0123, 7.30, 744, 1,230
std::string count(double value);                    // 1,234,568 if it is whole, else three digits
std::string percent(double ratio);                  // 45%, below a tenth 4.5% or 0.045%
std::string times(double ratio);                    // 1.07×, 7.3×, 29×

/// The results directory (plots/results); reads each CSV file once.
class Results {
 public:
  explicit Results(const std::filesystem::path &dir)
      : dir_((std::filesystem::absolute(dir) / "").lexically_normal().parent_path()) {}

  /// The repository: the directory that holds plots/results.
  std::filesystem::path root() const { return dir_.parent_path().parent_path(); }

  /// The rows of `name`.csv that match every filter, COLUMN=TEXT or COLUMN~TEXT (contains it; a +
  /// is a space), and the defaults of the columns that no filter names. Throws if there are none,
  /// and says what there is.
  Rows select(const std::string &name, Strings filters);

  /// All rows of `name`.csv. Those of a BENCH have a column more, cache_TBs: the bytes of K and V, each
  /// read once, over the time, in TB/s.
  const std::vector<Row> &read(const std::string &name);

  /// What `name`.csv holds: a BENCH, COUNTERS or NAMED values, such as ceilings.
  std::string kind(const std::string &name) {
    const Row &row = read(name)[0];
    return row.count("counter") ? "COUNTERS" : row.count("name") ? "NAMED" : "BENCH";
  }

  /// The value of `name` in a file of named values, such as ceilings; `missing` if there is none.
  double named(const std::string &file, const std::string &name, double missing);

 private:
  std::filesystem::path dir_;
  std::map<std::string, std::vector<Row>> read_;
};

/// What a row's options say of one of them: "8" of "kv-heads", "yes" of "causal"; `missing` if they do not.
std::string option(const Row &row, const std::string &name, const std::string &missing);

/// Takes the filters off the end of `list`.
Strings take_filters(Strings &list);

/// The different values in some columns of some rows: "batch=1 heads=16; batch=16 heads=16".
std::string different(const Rows &rows, const Strings &columns);

/// Throws if the rows differ in any of `columns`.
void require_same(const Rows &rows, const Strings &columns);

double number(const Row &row, const std::string &column);

/// The median of a column: of the repetitions of an interleaved run.
double median(const Rows &rows, const std::string &column);

/// The one value of a counter, which several rows may repeat but not contradict.
double counter_value(const Rows &rows);

/// The value of arithmetic over numbers and [keys], whose values are asked for. Throws Error.
double arithmetic(const std::string &text,
                  const std::function<double(const std::string &)> &value_of);

/// The value of `EXPR:FORMAT`, as printed between <!--=EXPR:FORMAT--> and <!--/-->.
std::string inline_value(const std::string &expression_and_format, Results &results);

}  // namespace docs

// The measured values that documentation quotes: the CSV files of plots/results, keys that name a
// value in them, arithmetic over those, and the ways to print a number.
#pragma once

#include <filesystem>
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

std::string trim(const std::string &s);
Strings split(const std::string &s, const std::string &separator);
Strings words(const std::string &s);
std::string join(const Strings &pieces, const std::string &separator);
void append_new(Strings &list, const std::string &s);  // unless it is there
std::string read_text(const std::filesystem::path &path);

// ---- numbers, printed ----

std::string significant(double value, int digits);  // and no exponent: 0.0123, 7.30, 744, 1,230
std::string grouped(double value);                  // 1,234,568
std::string count(double value);                    // grouped if it is whole, else three digits
std::string bytes(double value);                    // 4.28 GB
std::string percent(double ratio);                  // 45%, below a tenth 4.5% or 0.045%
std::string times(double ratio);                    // 1.07×, 7.3×, 29×

// ---- results ----

using Row = std::map<std::string, std::string>;  // column -> field
using Rows = std::vector<const Row *>;

/// A column that must equal a text ('=') or contain it ('~').
struct Filter {
  std::string column;
  char relation;
  std::string text;
};
using Filters = std::vector<Filter>;

/// A results file: counters if its name ends in "counters", named values if in "ceilings" or "power",
/// else a benchmark.
struct Csv {
  std::string name;  // without directory and ".csv"
  std::vector<Row> rows;
};

/// The results directory (plots/results); reads each CSV file once.
class Results {
 public:
  explicit Results(const std::filesystem::path &dir);

  /// Whether there is a file `name`.csv.
  bool has(const std::string &name) const;

  /// The file `name`.csv. Throws if there is none, or if its columns are not those of its kind.
  const Csv &read(const std::string &name);

  /// The repository: the directory that holds plots/results.
  std::filesystem::path root() const { return dir_.parent_path().parent_path(); }

 private:
  std::filesystem::path dir_;
  std::map<std::string, Csv> read_;
};

/// Takes the COLUMN=TEXT and COLUMN~TEXT words off the end of `list`, and lays them over the
/// defaults of a file's kind. `by_line` leaves out the defaults kernel=total and line=0.
Filters take_filters(Strings &list, bool counters, bool by_line = false);

/// The rows that match every filter; require() throws if there are none, and says what there is.
Rows find(const Csv &csv, const Filters &filters);
Rows require(const Csv &csv, const Filters &filters);

/// Throws if the rows differ in any of `columns`.
void require_same(const Rows &rows, const Strings &columns);

double number(const Row &row, const std::string &column);

/// The median of a column: of the repetitions of an interleaved run.
double median(const Rows &rows, const std::string &column);

/// The one value of a counter, which several rows may repeat but not contradict.
double counter_value(const Rows &rows);

/// What this GPU can do at most in one respect: a value of a ceilings file, in the file's unit.
double ceiling(const Csv &csv, const std::string &name);

/// The value of `EXPR:FORMAT`, as printed between <!--=EXPR:FORMAT--> and <!--/-->.
std::string inline_value(const std::string &expression_and_format, Results &results);

}  // namespace docs

// SPDX-License-Identifier: MIT
// The interface of ./step-NN: options, exit status, what it prints and what it writes.
#include <doctest/doctest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "common/testing/process.h"

namespace {

/// A small shape on the emulator, which takes a tenth of a second.
const std::string kSmall = " --device cpu --heads 1 --seqlen 128";

/// A folder that is gone after the test. Its name has a space: commands must quote it.
class Scratch {
 public:
  Scratch() {
    std::string name = std::filesystem::temp_directory_path() / "program test.XXXXXX";
    REQUIRE(mkdtemp(name.data()));
    path_ = name;
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  std::string file(const std::string &name) const { return path_ / name; }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

void write_text(const std::string &file, const std::string &text) {
  std::ofstream(file) << text;
}

bool has_gpu() {
  static const Finished run =
      run_command("./step-02 --device gpu --batch 1 --heads 1 --seqlen 128 --check-only");
  if (run.status == 3 && contains(run.err, "no GPU")) return false;
  REQUIRE_MESSAGE(run.status == 0, "step 02 on the GPU: ", run.err);
  return true;
}

/// Demands a refusal: this exit status, nothing but one line, and these parts in it.
void check_refused(const std::string &command, int status, const std::vector<std::string> &parts) {
  CAPTURE(command);
  const Finished run = run_command(command);
  CAPTURE(run.err);
  REQUIRE_MESSAGE(run.status != 127, "no such program; `make` builds them");
  CHECK(run.status == status);
  CHECK(run.out == "");
  CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
  for (const std::string &part : parts) {
    CAPTURE(part);
    CHECK(contains(run.err, part));
  }
}

std::string first_line(const std::string &file) {
  const std::vector<std::string> lines = lines_of(read_text(file));
  return lines.empty() ? "" : lines[0];
}

using Row = std::map<std::string, std::string>;

/// The rows of a CSV file by the names in its header. Every row has a value for every name.
std::vector<Row> read_csv(const std::string &file) {
  const std::vector<std::string> lines = lines_of(read_text(file));
  REQUIRE(!lines.empty());
  const std::vector<std::string> names = csv_fields(lines[0]);
  std::vector<Row> rows;
  for (std::size_t i = 1; i < lines.size(); i++) {
    const std::vector<std::string> values = csv_fields(lines[i]);
    REQUIRE(values.size() == names.size());
    Row &row = rows.emplace_back();
    for (std::size_t column = 0; column < names.size(); column++)
      row[names[column]] = values[column];
  }
  return rows;
}

/// A line of --profile's table.
struct Line {
  int number;
  std::string memory, operation;
  double requests, cost, each;
  std::string source;  // from the file; the table may cut it short
};

/// The table that a run of this step, "02-loop-inverted", printed.
std::vector<Line> profile_lines(const std::string &step, const std::string &out) {
  const std::vector<std::string> source = lines_of(read_text("steps/" + step + "/attention.cu"));
  const std::string file = "attention.cu:";
  std::vector<Line> lines;
  for (const std::string &text : lines_of(out)) {
    std::istringstream words(text);
    std::string where, printed;
    Line line;
    words >> where >> line.memory >> line.operation >> line.requests >> line.cost >> line.each;
    if (!words || !where.starts_with(file)) continue;
    std::getline(words >> std::ws, printed);
    line.number = std::stoi(where.substr(file.size()));
    line.source = source.at(line.number - 1);
    CHECK(printed.size() > 10);
    CHECK(contains(line.source, printed));
    lines.push_back(line);
  }
  CHECK(!lines.empty());
  return lines;
}

/// The most wavefronts that a shared-memory load takes, at a line whose source holds this text.
double most_wavefronts(const std::vector<Line> &lines, const std::string &source) {
  double most = 0;
  for (const Line &line : lines)
    if (line.memory == "shared" && line.operation == "R" && contains(line.source, source))
      most = std::max(most, line.each);
  return most;
}

}  // namespace

TEST_SUITE_BEGIN("program");

TEST_CASE("a bad argument: exit status 2, one line, no file") {
  // One of each kind; options_test.cpp and shape_test.cpp have them all.
  struct Bad {
    const char *step, *arguments;
    std::vector<std::string> parts;  // of the line: the option, the value, what is allowed
  };
  const std::vector<Bad> table = {
      {"02", "--frobnicate", {"02-loop-inverted: --frobnicate: no such option; --help lists"}},
      {"02", "256", {"256: not an option"}},
      {"02", "--seqlen", {"--seqlen needs a value"}},
      {"02", "--seqlen many", {"--seqlen many: must be a whole number from 1 to 1073741824"}},
      {"02", "--device 'a\nb\tc'", {"--device a\\nb\\x09c: must be auto, gpu or cpu"}},
      {"02", "--csv 'no\nsuch/folder'", {"--csv no\\nsuch/folder: cannot be written"}},
      {"02", "--seqlen 64", {"--seqlen 64: must be a multiple of 128"}},
      {"04", "--seqlen 96", {"--seqlen 96: must be a multiple of 64"}},
      {"02", "--heads 65536", {"--heads 65536: must be a whole number from 1 to 65535"}},
      {"02", "--batch 256 --heads 256", {"--heads 256: their product must be at most 65535"}},
      {"27", "--splits 268435456", {"--splits 268435456: must be auto or a whole number from 1"}},
      {"50", "--page-size 2147483647", {"--page-size 2147483647: must be a whole number from 1"}},
      {"02", "--seqlen 67108864", {"--seqlen 67108864: must be at most 67108863"}},
      {"02", "--causal", {"--causal: this step does not accept it; "}},
      {"15", "--type bf16", {"--type: this step does not accept it; "}},
      {"02", "--device gpu --profile", {"--profile cannot be combined with --device gpu"}},
      {"02",
       "--check-only --trace-csv t.csv",
       {"--trace-csv cannot be combined with --check-only"}},
      {"02",
       "--check-only --events-csv t.csv",
       {"--events-csv cannot be combined with --check-only"}},
      {"02", "--iters 5", {"--iters cannot be combined with --device cpu, because launches are"}},
      {"02",
       "--profile-csv ./new.csv",
       {"--profile-csv ./new.csv: must be another file than --csv"}},
  };
  const std::string programs = std::filesystem::current_path();
  for (const Bad &bad : table) {
    const Scratch scratch;  // a file would show, wherever the program put it
    check_refused("cd " + shell_word(scratch.file("")) + " && " +
                      shell_word(programs + "/step-" + bad.step) + " --device cpu --csv new.csv " +
                      bad.arguments,
                  2, bad.parts);
    CHECK(scratch.empty());
  }
}

TEST_CASE("output that is lost: exit status 2, one line") {
  if (!std::filesystem::exists("/dev/full")) return void(std::puts("SKIP: no /dev/full"));
  const Scratch scratch;
  const std::string csv = " --csv " + shell_word(scratch.file("new.csv"));
  for (const std::string &options :
       {"--check-only" + kSmall, std::string("--help"), std::string("--describe")}) {
    const Finished run = run_command("./step-02 " + options + csv + " >/dev/full");
    CHECK(run.status == 2);
    CHECK(run.err == "02-loop-inverted: standard output: writing failed\n");
  }
  CHECK(scratch.empty());
}

TEST_CASE("a CSV file that cannot be appended to: exit status 2, and it stays as it was") {
  const Scratch scratch;
  const std::string allowed = "must be a";
  for (const std::string option :
       {"--csv", "--profile-csv", "--trace-csv", "--blocks-csv", "--events-csv"}) {
    for (const std::string &path : {scratch.file("no/such/folder.csv"), scratch.file(""),
                                    scratch.file(std::string(300, 'x'))})
      check_refused("./step-02" + kSmall + " " + option + " " + shell_word(path), 2,
                    {option + " " + path + ": cannot be written", allowed});
    CHECK(scratch.empty());

    const std::string other = scratch.file("other.csv"), text = "month,rain\nMay,60\n";
    write_text(other, text);
    check_refused("./step-02" + kSmall + " " + option + " " + shell_word(other), 2,
                  {option + " " + other + ": has another header", allowed});
    CHECK(read_text(other) == text);
    std::filesystem::remove(other);
  }
  const std::string loop = scratch.file("loop.csv");
  std::filesystem::create_symlink(loop, loop);
  check_refused("./step-02" + kSmall + " --csv " + shell_word(loop), 2,
                {"--csv " + loop + ": cannot be written", allowed});
}

TEST_CASE("a shape that does not fit: exit status 3, one line, no file") {
  const std::vector<std::string> shapes = {
      "--seqlen 33554176",                                      // S: more than 2^50 bytes
      "--batch 65535 --heads 1 --seqlen 33554176 --head-dim ",  // the step's largest
      "--batch 255 --heads 257 --seqlen 33553920",
  };
  for (const std::string &name : step_names())
    for (std::string shape : shapes) {
      const std::string program = "./step-" + name.substr(0, 2);
      const std::vector<std::string> head_dims = describe(program).head_dims;
      if (shape.ends_with("--head-dim ")) shape += head_dims.back();
      if (head_dims.front() == "576")  // a head of fewer rows has 2^32 elements
        shape = std::regex_replace(shape, std::regex("335[0-9]{5}"), "7456512");
      const Scratch scratch;
      check_refused(
          program + " --device cpu --csv " + shell_word(scratch.file("new.csv")) + " " + shape, 3,
          {"out of memory: " + shape + " needs ", "; choose smaller sizes"});
      CHECK(scratch.empty());
    }
}

TEST_CASE("memory that runs out under way: exit status 3, one line") {
  const Finished run =
      run_command("ulimit -v 1000000; ./step-02 --device cpu --heads 2 --seqlen 4194304");
  CHECK(run.status == 3);
  CHECK(lines_of(run.err).size() == 1);
  CHECK(contains(run.err, "out of memory: --heads 2 --seqlen 4194304"));
}

TEST_CASE("sizes that nobody has memory for are named, whichever they are") {
  for (const std::string sizes : {"--page-size 1073741824", "--batch 1 --seqlen-k 1073741824",
                                  "--lengths 1:1073741824 --layout packed"})
    check_refused("./step-50 --device cpu --head-dim 64 " + sizes, 3,
                  {"out of memory: --head-dim 64 " + sizes.substr(0, sizes.find(" --layout"))});
}

TEST_CASE("--device gpu without a GPU: exit status 3, one line, no file") {
  if (has_gpu()) return void(std::puts("SKIP: this machine has a GPU"));
  const Scratch scratch;
  check_refused("./step-02 --device gpu --csv " + shell_word(scratch.file("new.csv")), 3,
                {"--device gpu: no GPU (", "run it on the emulator with --device cpu"});
  CHECK(scratch.empty());
}

TEST_CASE("--iters without a GPU: exit status 2, one line") {
  if (has_gpu()) return void(std::puts("SKIP: this machine has a GPU"));
  check_refused("./step-02 --iters 5", 2,
                {"--iters 5 needs a GPU, where launches are timed (no GPU: ", "); leave it out"});
}

TEST_CASE("--rank without a GPU: exit status 2, one line") {
  if (has_gpu()) return void(std::puts("SKIP: this machine has a GPU"));
  check_refused(
      "./step-71 --rank 1:file", 2,
      {"--rank 1 needs GPUs: the emulator runs all of --gpus in one process; leave it out"});
  check_refused("./step-71 --device cpu --rank 0:file", 2, {"--rank 0 needs GPUs: "});
}

namespace {

/// Runs ranks.sh where nvidia-smi finds so many GPUs.
Finished run_ranks(const std::string &arguments, int gpus = 0, const std::string &before = "") {
  const Scratch scratch;
  const std::string found = scratch.file("nvidia-smi");
  std::ofstream(found) << "#!/bin/sh\nfor i in $(seq " << gpus
                       << "); do echo \"GPU $i: a GPU\"; done\n";
  std::filesystem::permissions(found, std::filesystem::perms::owner_all);
  return run_command("PATH=" + shell_word(scratch.file("")) + ":$PATH " + before +
                     " common/program/ranks.sh " + arguments);
}

}  // namespace

TEST_CASE("ranks.sh starts a process for each rank, with one file, and ends all if one fails") {
  const Finished run = run_ranks("3 sh -c 'echo \"$@\"' name --causal | sort | sed 's|:.*/|:|'");
  const std::vector<std::string> lines = lines_of(run.out);
  REQUIRE(lines.size() == 3);
  for (int rank = 0; rank < 3; rank++) {
    const std::string start = "--causal --gpus 3 --rank " + std::to_string(rank) + ":";
    CHECK(lines[rank].starts_with(start));
    CHECK(lines[rank].substr(start.size()) == lines[0].substr(start.size()));
  }
  // Rank 1 fails, and the others would sleep for longer than the test may take.
  CHECK(run_ranks("3 sh -c 'case $4 in 1:*) exit 3;; esac; exec sleep 60' name", 3, "timeout 20")
            .status == 3);
}

TEST_CASE("ranks.sh: if it is interrupted or ended, so are the ranks") {
  for (const auto &[signal, status] : {std::pair("INT", 130), std::pair("TERM", 143)}) {
    // Rank 1 sends the signal when rank 0 has begun, too.
    const Finished run = run_ranks(
        "2 sh -c 'trap \"echo ended; exit\" TERM; file=${4#*:}.part; case $4 in 0:*) touch $file;; "
        "*) "
        "while [ ! -e $file ]; do sleep 0.05; done; kill -s " +
            std::string(signal) + " $PPID;; esac; for i in $(seq 100); do sleep 0.1; done' name",
        0, "env --default-signal=INT timeout 20");
    CHECK(run.status == status);
    CHECK(run.out == "ended\nended\n");
  }
}

TEST_CASE("ranks.sh says in one line what it was not given, and which GPUs this machine lacks") {
  for (const std::string arguments : {"", "2", "two ./step-71", "0 ./step-71"}) {
    const Finished run = run_ranks(arguments);
    CHECK(run.status == 2);
    CHECK(run.err == "usage: ranks.sh N PROGRAM [OPTION...], as: ranks.sh 2 ./step-71 --causal\n");
  }
  const Finished run = run_ranks("2 ./step-71", 1);
  CHECK(run.status == 3);
  CHECK(run.err ==
        "ranks.sh: 2 ranks need 2 GPUs, and this machine has 1; ./step-71 --device cpu --gpus 2 "
        "runs on "
        "the emulator\n");
}

TEST_CASE("every step describes and explains itself, whatever else is asked for") {
  for (const std::string &name : step_names()) {
    CAPTURE(name);
    const std::string program = "./step-" + name.substr(0, 2);
    CHECK(describe(program).step == name);
    for (const std::string option : {"--help", "-h", "--seqlen 128 --help"}) {
      const Finished run = run_command(program + " " + option);
      CHECK(run.status == 0);
      CHECK(run.err == "");
      CHECK(run.out.starts_with("usage: " + program + " [options]\n"));
    }
  }
}

TEST_CASE("what a run says: device, shape, check, counts") {
  const Finished run = run_command("./step-02 --device cpu --batch 1 --heads 3 --seqlen 128");
  CHECK(run.status == 0);
  CHECK(run.err == "");
  CHECK(run.out.starts_with("02-loop-inverted on emulator\n"));
  CHECK(contains(run.out, "shape    batch 1, heads 3, seqlen 128, head dim 64, normal inputs\n"));
  CHECK(contains(run.out, "check    384 of 384 rows: error "));
  CHECK(contains(run.out, ": passed\n"));
  CHECK(contains(run.out, "counts\n"));
  CHECK(!contains(run.out, "no GPU"));
  CHECK(!contains(run.out, "lines "));

  const Finished only = run_command("./step-02 --check-only" + kSmall);
  CHECK(only.status == 0);
  CHECK(contains(only.out, ": passed\n"));
  CHECK(!contains(only.out, "counts"));
  CHECK(lines_of(only.out).size() == 3);
}

TEST_CASE("without --device it runs where it can, and says where") {
  const Finished run = run_command("./step-02 --check-only --heads 1 --seqlen 128");
  CHECK(run.status == 0);
  CHECK(contains(run.out, " on emulator") == !has_gpu());
  CHECK(contains(run.out, " (no GPU: ") == !has_gpu());
  // Only the emulator counts.
  CHECK(contains(run_command("./step-02 --profile --heads 1 --seqlen 128").out, " on emulator"));
}

TEST_CASE("the same seed gives the same run, another seed other inputs") {
  const auto out = [](const std::string &options) {
    return run_command("./step-02" + kSmall + " " + options).out;
  };
  CHECK(out("--seed 7") == out("--seed 7"));
  CHECK(out("") == out("--seed 1"));
  CHECK(out("--seed 7") != out("--seed 8"));
  CHECK(out("--seed 0") != out("--seed 18446744073709551615"));

  const Scratch scratch;
  std::set<std::string> errors;
  for (const std::string seed : {"1", "2", "3"})
    out("--check-only --csv " + shell_word(scratch.file("r.csv")) + " --seed " + seed);
  for (const Row &row : read_csv(scratch.file("r.csv"))) errors.insert(row.at("rms_error"));
  CHECK(errors.size() == 3);
}

TEST_CASE("--csv appends a row under one header") {
  const Scratch scratch;
  const std::string file = scratch.file("results.csv");
  const std::string csv = " --csv " + shell_word(file);
  for (const std::string line :
       {"./step-02 --device cpu --batch 2 --heads 1 --seqlen 128 --head-dim 128",
        "./step-03 --check-only --device cpu --heads 1 --seqlen 128"})
    CHECK(run_command(line + csv).status == 0);

  CHECK(first_line(file) ==
        "step,device,batch,heads,seqlen,head_dim,options,operations,kv_bytes,median_ms,min_ms,"
        "sm_clocks,tflops,rms_error");
  std::vector<Row> rows = read_csv(file);
  REQUIRE(rows.size() == 2);
  for (Row &row : rows) {
    const double error = std::stod(row["rms_error"]);
    CHECK(error > 0);
    CHECK(error < 1e-3);
    row.erase("rms_error");
  }
  Row expected = {{"step", "02-loop-inverted"},
                  {"device", "emulator"},
                  {"batch", "2"},
                  {"heads", "1"},
                  {"seqlen", "128"},
                  {"head_dim", "128"},
                  {"options", ""},
                  {"operations", "16777216"},  // 4 * 2 batch * 128 * 128 pairs * 128
                  {"kv_bytes", "131072"},      // 2 of K and V * 2 batch * 128 * 128 * 2 bytes
                  {"median_ms", ""},
                  {"min_ms", ""},
                  {"sm_clocks", ""},
                  {"tflops", ""}};
  CHECK(rows[0] == expected);
  // The same of a problem that is not run.
  const std::string said =
      run_command("./step-02 --describe --batch 2 --heads 1 --seqlen 128 --head-dim 128").out;
  CHECK(contains(said, "\noperations 16777216\nkv-bytes 131072\n"));
  const std::string of_others =
      run_command(
          "./step-57 --describe --batch 2 --heads 4 --kv-heads 2 --lengths 3:5,2:4 --causal "
          "--head-dim 192 --head-dim-v 128 --layout packed")
          .out;  // 3 + 4 + 5 and 3 + 4 pairs of a head, and 5 + 4 keys
  CHECK(contains(of_others, "\noperations 48640\nkv-bytes 11520\n"));
  CHECK(run_command("./step-02 --describe --seqlen 100").status == 2);
  expected["step"] = "03-bank-conflicts";
  expected["batch"] = "1";
  expected["head_dim"] = "64";
  expected["operations"] = "4194304";
  expected["kv_bytes"] = "32768";
  CHECK(rows[1] == expected);
}

TEST_CASE("a row that was cut off does not spoil the next") {
  const Scratch scratch;
  const std::string file = scratch.file("results.csv");
  const std::string run = "./step-02 --check-only" + kSmall + " --csv " + shell_word(file);
  CHECK(run_command(run).status == 0);
  std::filesystem::resize_file(file,
                               std::filesystem::file_size(file) - 1);  // the end of the line
  CHECK(run_command(run).status == 0);
  CHECK(read_csv(file).size() == 2);
}

TEST_CASE("on a GPU a row has the time and the speed") {
  if (!has_gpu()) return void(std::puts("SKIP: no GPU"));
  const Scratch scratch;
  const std::string file = scratch.file("results.csv");
  const Finished run = run_command(
      "./step-02 --device gpu --batch 2 --heads 4 --seqlen 1024 --head-dim 64 --iters 5 --csv " +
      shell_word(file));
  CHECK(run.status == 0);
  CHECK(contains(run.out, "ms min of 5\n"));
  const std::vector<Row> rows = read_csv(file);
  REQUIRE(rows.size() == 1);
  const double median = std::stod(rows[0].at("median_ms"));
  CHECK(std::stod(rows[0].at("min_ms")) <= median);
  CHECK(std::stod(rows[0].at("tflops")) ==
        doctest::Approx(4.0 * 2 * 4 * 1024 * 1024 * 64 / median / 1e9).epsilon(1e-3));
}

TEST_CASE("on a GPU the clocks are those of ncu, and --again times for each line") {
  if (!has_gpu()) return void(std::puts("SKIP: no GPU"));
  const Scratch scratch;
  const std::string file = scratch.file("results.csv");
  const std::string run = " ./step-02 --device gpu --batch 1 --heads 16 --seqlen 2048 ";
  CHECK(run_command("printf '3\\n5\\n'|" + run + "--again --csv " + shell_word(file)).status == 0);
  const std::vector<Row> rows = read_csv(file);
  REQUIRE(rows.size() == 2);
  const double clocks = std::stod(rows[1].at("sm_clocks"));
  CHECK(std::stod(rows[0].at("sm_clocks")) == doctest::Approx(clocks).epsilon(0.01));
  if (run_command("ncu --version").status != 0) return void(std::puts("SKIP: no ncu"));
  const Finished ncu = run_command(
      "ncu --clock-control none --metrics sm__cycles_elapsed.avg --csv" + run +
      R"(--check-only|awk -F'","' '$13 ~ /^sm__cycles/ { gsub(/[",]/, "", $15); print $15 }')");
  CHECK(std::stod(ncu.out) == doctest::Approx(clocks).epsilon(0.01));
}

TEST_CASE("--blocks-csv: what each block of a causal step did, in the order of their start") {
  const Scratch scratch;
  const std::string file = scratch.file("blocks.csv"), profile = scratch.file("counts.csv");
  const Finished run = run_command(
      "./step-20 --device cpu --causal --heads 2 --seqlen 384 --head-dim 64 --blocks-csv " +
      shell_word(file) + " --profile-csv " + shell_word(profile));
  CHECK(run.status == 0);
  CHECK(first_line(file) == "step,batch,heads,seqlen,head_dim,options,launch,block,x,y,z,mma");
  const std::vector<Row> rows = read_csv(file);
  REQUIRE(rows.size() == 2 * 384 / 128);
  long long sum = 0;
  for (std::size_t i = 0; i < rows.size(); i++) {
    CHECK(rows[i].at("step") == "20-causal");
    CHECK(rows[i].at("options") == "causal");
    CHECK(rows[i].at("launch") == "0");
    CHECK(rows[i].at("block") == std::to_string(i));
    CHECK(rows[i].at("x") == std::to_string(i % 2));  // the head
    CHECK(rows[i].at("y") == std::to_string(i / 2));
    CHECK(rows[i].at("z") == "0");
    // 64 keys of a tile, 64 columns and 128 rows, for each of two products. The last rows first,
    // with six tiles; then four, then two.
    const long long tile = 2 * (128 / 16) * (64 / 8) * (64 / 16);
    CHECK(std::stoll(rows[i].at("mma")) == tile * static_cast<long long>(6 - 2 * (i / 2)));
    sum += std::stoll(rows[i].at("mma"));
  }
  for (const Row &row : read_csv(profile)) {
    CHECK(row.at("options") == "causal");
    if (row.at("line") == "0" && row.at("counter") == "mma")
      CHECK(std::stoll(row.at("value")) == sum);
  }
}

TEST_CASE("--profile-csv: every counter in total, and line by line") {
  const Scratch scratch;
  const std::string file = scratch.file("counts.csv");
  for (int i = 0; i < 2; i++)
    CHECK(run_command("./step-02" + kSmall + " --profile-csv " + shell_word(file)).status == 0);
  CHECK(first_line(file) == "step,source,batch,heads,seqlen,head_dim,options,line,counter,value");

  std::map<std::string, long long> total, sum;
  const std::vector<Row> rows = read_csv(file);
  for (std::size_t i = 0; i < rows.size() / 2; i++) {
    const Row &row = rows[i];
    CHECK(row == rows[i + rows.size() / 2]);  // the second run appended the same
    CHECK(row.at("step") == "02-loop-inverted");
    CHECK(row.at("source") == "emulator");
    CHECK(row.at("heads") == "1");
    CHECK(row.at("seqlen") == "128");
    CHECK(row.at("head_dim") == "64");
    (row.at("line") == "0" ? total : sum)[row.at("counter")] += std::stoll(row.at("value"));
  }
  // Each of 4 blocks of 4 warps: 8 rows, of 64 k steps with 1 + 4 loads, and 128 keys with 1 + 2.
  CHECK(total["shared load requests"] == 4 * 4 * 8 * (64 * 5 + 128 * 3));
  CHECK(total["shared load wavefronts"] == 4 * 4 * 8 * (64 * (1 + 4 * 32) + 128 * 3));
  CHECK(total["unique global bytes read"] == 3 * 128 * 64 * 2);     // Q, K, V
  CHECK(total["unique global bytes written"] == 1 * 128 * 64 * 2);  // O
  for (const auto &[counter, value] : sum) {
    CAPTURE(counter);
    CHECK(total[counter] == value);
  }
  CHECK(!sum.empty());
}

TEST_CASE("--streams-csv needs several GPUs") {
  const Scratch scratch;
  for (const std::string command : {"./step-02", "./step-71 --gpus 1"})
    check_refused(command + " --device cpu --streams-csv " + shell_word(scratch.file("a.csv")), 2,
                  {"--streams-csv needs several GPUs: add --gpus 2, which steps 70 to 76 accept"});
  CHECK(scratch.empty());
}

TEST_CASE("--trace-csv: where each lane of a request goes") {
  const Scratch scratch;
  const std::string file = scratch.file("trace.csv");
  const Finished run =
      run_command("./step-02 --profile" + kSmall + " --trace-csv " + shell_word(file));
  CHECK(run.status == 0);
  CHECK(first_line(file) == "line,op,request,lane,address,bytes,bank,wavefront");

  std::string k_line;  // where K is read
  for (const Line &line : profile_lines("02-loop-inverted", run.out))
    if (line.memory == "shared" && line.operation == "R" && contains(line.source, "smem.K("))
      k_line = std::to_string(line.number);
  std::set<std::string> lanes, banks, wavefronts;
  for (const Row &row : read_csv(file)) {
    CHECK(std::stoi(row.at("bank")) == std::stoi(row.at("address")) / 4 % 32);
    if (row.at("line") != k_line || row.at("request") != "0") continue;
    CHECK(row.at("bytes") == "2");
    CHECK(row.at("op") == "load");
    lanes.insert(row.at("lane"));
    banks.insert(row.at("bank"));
    wavefronts.insert(row.at("wavefront"));
  }
  CHECK(lanes.size() == 32);
  CHECK(banks.size() == 1);
  CHECK(wavefronts.size() == 32);
}

TEST_CASE("--profile names the line whose loads conflict") {
  const auto profile = [](const std::string &step, const std::string &options) {
    const Finished run =
        run_command("./step-" + step.substr(0, 2) + " --profile" + kSmall + options);
    CHECK(run.status == 0);
    return profile_lines(step, run.out);
  };
  const std::vector<Line> inverted = profile("02-loop-inverted", "");
  CHECK(most_wavefronts(inverted, "smem.K(lane") == 32);
  for (const std::string source : {"smem.Q(", "smem.V(", "smem.P("})
    CHECK(most_wavefronts(inverted, source) == 1);

  const std::vector<Line> swizzled = profile("03-bank-conflicts", "");
  CHECK(most_wavefronts(swizzled, "smem.K(lane") == 1);
  CHECK(most_wavefronts(swizzled, "") == 1);  // over all shared loads
}

TEST_CASE("the tensor cores' instructions are counted, and their conflicts seen before and after") {
  const Scratch scratch;
  // 2 blocks of 2 warps with 2 m tiles, 4 tiles of 32 keys. A tile and m tile: 4 k steps with Q and
  // 2 of K for 4 mma each, 2 k steps with 8 halves of V for a mma each.
  const int tiles = 2 * 2 * 2 * 4, x4 = tiles * 4 * 3, x2 = tiles * 2 * 8, mma = tiles * 4 * 4 + x2;
  const std::map<std::string, int> matrix_wavefronts = {{"05", 8}, {"06", 1}};
  for (const auto &[step, wavefronts] : matrix_wavefronts) {
    CAPTURE(step);
    const std::string file = scratch.file(step + ".csv"), trace = scratch.file(step + "-trace.csv");
    const Finished run = run_command("./step-" + step + " --profile" + kSmall + " --profile-csv " +
                                     shell_word(file) + " --trace-csv " + shell_word(trace));
    CHECK(run.status == 0);
    std::map<std::string, long long> total;
    for (const Row &row : read_csv(file))
      if (row.at("line") == "0") total[row.at("counter")] = std::stoll(row.at("value"));
    CHECK(total["mma"] == mma);
    CHECK(total["ldmatrix"] == x4 + x2);
    CHECK(total["shared load requests"] == x4 + x2);
    CHECK(total["shared load wavefronts"] == (4 * x4 + 2 * x2) * wavefronts);
    CHECK(total["shared load wavefronts, ideal"] == 4 * x4 + 2 * x2);
    // Q, and for each of 2 blocks K and V: 128 bytes a row, 512 bytes a request.
    const int copies = (128 + 2 * 2 * 128) * 128 / 512;
    CHECK(total["cp.async requests"] == copies);
    CHECK(total["cp.async wavefronts"] == 4 * copies);
    CHECK(contains(run.out, "  " + std::to_string(mma) + " mma, " + std::to_string(x4 + x2) +
                                " ldmatrix, " + std::to_string(copies) + " cp.async"));
    CHECK(contains(run.out, wavefronts == 1 ? "   4.00  const Vector<std::uint32_t, 4> k"
                                            : "  32.00  const Vector<std::uint32_t, 4> k"));
    std::set<std::string> operations;
    for (const Row &row : read_csv(trace)) operations.insert(row.at("op"));
    CHECK(operations == std::set<std::string>{"ldmatrix", "cp.async"});
  }
}

TEST_SUITE_END();

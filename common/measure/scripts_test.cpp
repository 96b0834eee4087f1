// SPDX-License-Identifier: MIT
// What the Makefile and the measuring scripts decide by awk: ladder.awk, ncu.awk, problems.awk and truth.awk, given
// small pieces of their input. And what the scripts refuse.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

/// Runs awk over texts, each in a file of its own.
Finished awk(const std::string &arguments, const std::vector<std::string> &texts) {
  const fs::path folder = fs::temp_directory_path() / ("scripts." + std::to_string(getpid()));
  std::string line = "awk " + arguments;
  for (std::size_t i = 0; i < texts.size(); i++) {
    const fs::path file = folder / ("0" + std::to_string(i) + "-idea") / "attention.cu";
    fs::create_directories(file.parent_path());
    std::ofstream(file) << texts[i];
    line += " " + file.string();
  }
  const Finished finished = run_command(line);
  fs::remove_all(folder);
  return finished;
}

const std::string kLadder = "-f common/program/ladder.awk";
const std::string kAny = "// Step 00\n//\n// Needs       sm_75\n";
const std::string kAmpere =
    "// Needs       sm_80: cp.async, mma.m16n8k16\n// Takes       --causal, --window,\n"
    "//             --sinks\n// Before      step 00: a wall\n";
const std::string kHopper = "// Needs       sm_90a: wgmma\n";

/// A line that ncu prints of a metric.
std::string measured(const std::string &metric, const std::string &value) {
  std::string line = "\"0\"";
  for (int i = 0; i < 11; i++) line += ",\"x\"";
  return line + ",\"" + metric + "\",\"inst\",\"" + value + "\"\n";
}

/// A counters CSV of one count at batch 1, heads 3, seqlen 384.
std::string count(const std::string &step, const std::string &source, int head_dim,
                  const std::string &counter, int value, const std::string &options = "",
                  const std::string &line = "0") {
  return "step,source,batch,heads,seqlen,head_dim,options,line,\"" + counter + "\"\n" + step + "," +
         source + ",1,3,384," + std::to_string(head_dim) + "," + options + "," + line + "," +
         std::to_string(value) + "\n";
}

/// What truth.sh says of a step's tiles.
std::string tiles(const std::string &step, const std::string &more = "warps 4") {
  return "tile " + step + " Br 128\ntile " + step + " Bc 64\ntile " + step + " " + more + "\n";
}

std::string both(const std::string &step, int head_dim, const std::string &counter, int emulator,
                 int ncu) {
  return tiles(step) + count(step, "emulator", head_dim, counter, emulator) +
         count(step, "ncu", head_dim, counter, ncu);
}

}  // namespace

TEST_CASE("ladder: what the headers say, and what of ARCH a step is compiled for") {
  const std::string columns = "\"step\",\"needs\",\"why\",\"takes\",\"before\",\"archs\"\n";
  CHECK(awk("-v arch='sm_75 sm_80 sm_90' " + kLadder, {kAny, kAmpere, kHopper}).out ==
        columns + "\"00-idea\",\"sm_75\",\"\",\"\",\"\",\"sm_75 sm_80 sm_90\"\n" +
            "\"01-idea\",\"sm_80\",\"cp.async, mma.m16n8k16\",\"--causal --window --sinks\",\"00\","
            "\"sm_80 sm_90\"\n" +
            "\"02-idea\",\"sm_90a\",\"wgmma\",\"\",\"\",\"sm_90a\"\n");
  // One chip's: neither before nor after it, and once only.
  const std::string hopper = columns + "\"00-idea\",\"sm_90a\",\"wgmma\",\"\",\"\",\"";
  CHECK(awk("-v arch='sm_80 sm_100' " + kLadder, {kHopper}).out == hopper + "\"\n");
  CHECK(awk("-v arch='sm_90 sm_90a' " + kLadder, {kHopper}).out == hopper + "sm_90a\"\n");
}

TEST_CASE("ladder: only the header counts, and one without 'Needs' is an error") {
  CHECK(awk(kLadder, {kAny + "int x;\n// Takes       --causal\n// Needs       sm_90\n"}).out ==
        awk(kLadder, {kAny}).out);
  const Finished finished = awk(kLadder, {"// Step 00\n"});
  CHECK(finished.status == 1);
  CHECK(finished.err == "00-idea: the header has no '// Needs  sm_NN'\n");
}

TEST_CASE("ncu: kernels are summed, loads that are switched off are no requests") {
  const Finished finished =
      awk("-f common/measure/ncu.awk -v step=05-x -v problem=1,2,512,128,causal "
          "common/emulator/counters.def",
          {measured("smsp__inst_executed_op_ldsm.sum", "1,000") +
           measured("smsp__inst_executed_op_ldsm.sum", "24") +
           measured("smsp__inst_executed_op_shared_ld.sum", "96") +
           measured("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "0") +
           measured("smsp__inst_executed_op_ldgsts.sum", "0") +
           measured("smsp__inst_executed_pipe_tensor_op_gmma.sum", "0") +
           measured("smsp__inst_executed_op_tma_ld.sum", "7")});
  CHECK(finished.out.find("05-x,ncu,1,2,512,128,causal,0,\"ldmatrix\",1024\n") !=
        std::string::npos);
  CHECK(finished.out.find("\"shared load requests\",1024\n") != std::string::npos);
  CHECK(finished.out.find("\"TMA loads\",7\n") != std::string::npos);
  CHECK(finished.out.find("cp.async") == std::string::npos);
  CHECK(finished.out.find("wgmma") == std::string::npos);
}

TEST_CASE("counters: a problem is one row, and no count has two values") {
  const std::string list = "22-x,ncu,1,3,384,64,\"causal lengths=3,4:5\",0,";
  const std::string counts =
      "05-x,emulator,1,3,384,64,,0,\"mma\",0\n"
      "05-x,emulator,1,3,384,64,,line,\"mma\",2\n" +
      list + "\"wavefronts, ideal\",5\n" + list + "\"mma\",6.5\n";
  const std::string problems = "-f common/measure/problems.awk";
  CHECK(awk(problems, {counts + counts}).out ==
        "step,source,batch,heads,seqlen,head_dim,options,line,\"mma\",\"wavefronts, ideal\"\n"
        "05-x,emulator,1,3,384,64,,0,0,\n05-x,emulator,1,3,384,64,,line,2,\n" +
            list + "6.5,5\n");
  const Finished twice = awk(problems, {counts + list + "\"mma\",7\n"});
  CHECK(twice.status == 1);
  CHECK(twice.out == "");
  CHECK(twice.err ==
        "problems.awk: two values of 'mma' at " + list.substr(0, list.size() - 1) + "\n");
}

TEST_CASE("truth: equal, explained by the shape, or a failure") {
  const std::string truth = "-f common/measure/truth.awk";
  const Finished equal = awk(truth, {both("13-lane-map", 64, "mma", 7, 7)});
  CHECK(equal.status == 0);
  CHECK(equal.out == "  batch 1, heads 3, seqlen 384, head dim 64: 1 of 1 counts are equal\n");
  // 9 blocks, 4 warps, 4 copies each in the last iteration.
  const Finished off = awk(truth, {both("13-lane-map", 64, "cp.async requests", 2016, 2160)});
  CHECK(off.status == 0);
  CHECK(off.out.find("144 switched off") != std::string::npos);
  CHECK(awk(truth, {both("13-lane-map", 64, "cp.async requests", 2016, 2161)}).status == 1);
  CHECK(awk(truth, {both("13-lane-map", 128, "cp.async requests", 2016, 2160)}).status == 1);
  CHECK(awk(truth, {both("13-lane-map", 64, "cp.async wavefronts", 8064, 12672)}).status == 0);
  CHECK(awk(truth, {both("13-lane-map", 64, "shared wavefronts, ideal", 42624, 43200)}).status ==
        0);
  // Where the predicate is not P0, no wavefronts.
  CHECK(awk(truth, {both("16-late-copies", 64, "cp.async requests", 2016, 2160)}).status == 0);
  CHECK(awk(truth, {both("16-late-copies", 64, "cp.async wavefronts", 8064, 12672)}).status == 1);
  CHECK(awk(truth, {both("09-v-pairs", 64, "cp.async requests", 2016, 2160)}).status == 1);
  // Bulk reductions are stores of the TMA in ncu's metric.
  const auto status_of_stores = [&](int of_ncu) {
    return awk(truth, {both("66-hopper", 64, "TMA stores", 60, of_ncu) +
                       count("66-hopper", "emulator", 64, "bulk reductions", 90)})
        .status;
  };
  CHECK(status_of_stores(150) == 0);
  CHECK(status_of_stores(149) == 1);
  // Problems are told apart by their options, which may hold commas; a line's counts are left out.
  const std::string list = "\"causal lengths=3,4:5\"";
  const Finished problems =
      awk(truth, {tiles("22-x") + count("22-x", "emulator", 64, "shared wavefronts, ideal", 5) +
                  count("22-x", "ncu", 64, "shared wavefronts, ideal", 5) +
                  count("22-x", "emulator", 64, "shared wavefronts, ideal", 6, list) +
                  count("22-x", "emulator", 64, "shared wavefronts, ideal", 8, list, "somewhere") +
                  count("22-x", "ncu", 64, "shared wavefronts, ideal", 7, list)});
  CHECK(problems.status == 1);
  CHECK(
      problems.out ==
      "  batch 1, heads 3, seqlen 384, head dim 64: 1 of 1 counts are equal\n"
      "  batch 1, heads 3, seqlen 384, head dim 64, causal lengths=3,4:5: 0 of 1 counts are equal\n"
      "    22-x, shared wavefronts, ideal: emulator 6, ncu 7: 1 NOT EXPLAINED\n");
}

TEST_CASE("truth: what nvcc makes of a source of Part III") {
  // The exit status, and what explains the difference.
  const auto explained = [&](const std::string &head, const std::string &step, int head_dim,
                             const std::string &counter, int emulator, int ncu,
                             const std::string &options = "") {
    const Finished finished =
        awk("-f common/measure/truth.awk",
            {head + count(step, "emulator", head_dim, counter, emulator, options) +
             count(step, "ncu", head_dim, counter, ncu, options)});
    const std::string line = lines_of(finished.out).at(1);
    return std::to_string(finished.status) + line.substr(line.rfind(':'));
  };
  // 9 blocks, 4 warps, 4 copies each in the first iteration; their predicate is not P0. What is left is open.
  const std::string ragged = tiles("21-ragged", "warps 4");
  CHECK(awk("-f common/measure/truth.awk", {count("21-ragged", "emulator", 64, "mma", 5) +
                                            count("21-ragged", "ncu", 64, "mma", 6)})
            .status ==
        2);  // a rule that lacks a number of the source does not pass for no difference
  CHECK(explained(ragged, "21-ragged", 64, "cp.async requests", 1000, 1144) ==
        "0: 144 switched off");
  CHECK(explained(ragged, "21-ragged", 64, "cp.async wavefronts", 4000, 3996) ==
        "1: -4 NOT EXPLAINED");
  CHECK(explained(ragged + "open 21-ragged|1|3|384|64||cp.async wavefronts|-4\n", "21-ragged", 64,
                  "cp.async wavefronts", 4000, 3996) == "0: -4 open");
  // Of 419 keys the last tile has 35, that is 3 rows in the request of data and zeros. All 9 blocks load it, and
  // of causal ones the last 3. No tile of Q is ragged.
  const auto beside_zeros = [&](int less, const std::string &options, int head_dim = 64) {
    return explained(ragged, "21-ragged", head_dim, "cp.async wavefronts", 4000, 4000 - less,
                     options);
  };
  const std::string in_p0 = " data beside zeros, with P0";
  CHECK(beside_zeros(27, "seqlen-k=419") == "0: -27" + in_p0);
  CHECK(beside_zeros(54, "seqlen-k=419") == "0: -54" + in_p0);
  CHECK(beside_zeros(9, "causal seqlen-k=419") == "0: -9" + in_p0);
  CHECK(beside_zeros(18, "seqlen-k=419", 128) == "0: -18" + in_p0);  // 1 row, of 2 lines
  for (const int other : {-27, 1, 9, 26, 28, 53, 81})
    CHECK(beside_zeros(other, "seqlen-k=419") == "1: " + std::to_string(-other) + " NOT EXPLAINED");
  CHECK(beside_zeros(27, "\"seqlen-k=419 lengths=1,2\"") == "1: -27 NOT EXPLAINED");
  CHECK(explained(ragged, "21-ragged", 64, "shared store wavefronts", 4000, 3973, "seqlen-k=419") ==
        "1: -27 NOT EXPLAINED");
  CHECK(explained(ragged + "open 21-ragged|1|3|384|64|seqlen-k=419|cp.async wavefronts|-54\n",
                  "21-ragged", 64, "cp.async wavefronts", 4000, 3973,
                  "seqlen-k=419") == "1: -27 NOT EXPLAINED");  // the committed number and no other
  // 9 blocks of 8 warps at head dim 192: 12 loads of Q in each of the 5 iterations that are not the first.
  const std::string dims = tiles("29-types-and-dims", "warps 8");
  CHECK(explained(dims + count("29-types-and-dims", "emulator", 192, "votes", 9 * 8 * 6),
                  "29-types-and-dims", 192, "ldmatrix", 1000,
                  1000 + 12 * 9 * 8 * 5) == "0: 4320 switched off");
  // At 96, of 9 blocks: 5 tiles of V before the last with 48 requests each, and of both last tiles, 33 rows, 48.
  CHECK(explained(dims, "29-types-and-dims", 96, "cp.async wavefronts", 9000, 9000 - 9 * 48 * 7,
                  "seqlen-k=353") == "0: half lines of data with P0");
  CHECK(explained(dims, "29-types-and-dims", 96, "cp.async wavefronts", 9000, 9001 - 9 * 48 * 7,
                  "seqlen-k=353") == "1: half lines of data with P0; 1 NOT EXPLAINED");
  // Of 384 queries the first 256 see none of 100 keys.
  CHECK(explained(ragged, "21-ragged", 64, "cp.async requests", 1000, 1048,
                  "causal seqlen-k=100") == "0: 48 switched off");
  // 50 tiles of K, counted once per warp: two times three loads. 36 warps copy Q: three loads.
  CHECK(explained(tiles("24-rope", "warps 4") + count("24-rope", "emulator", 64, "votes", 50),
                  "24-rope", 64, "shared load requests", 100, 508) == "0: 408 switched off");
  // Blocks of 8 warps. Of 256 rows of Q, 64 copies at head dim 64, each warp has some; of 20, five copies,
  // five warps. The queries of 3 heads are 60 tiles of 20 rows, those of a group of 3 are 58.
  const auto cache = [&](int rows, int barriers, const std::string &options) {
    return "tile 26-pages rows " + std::to_string(rows) + "\n" +
           count("26-pages", "emulator", 64, "block barriers", barriers, options);
  };
  CHECK(explained(cache(256, 6 * 8 * 2, ""), "26-pages", 64, "shared load requests", 100, 244) ==
        "0: 144 switched off");
  CHECK(explained(cache(20, 60 * 8 * 2, ""), "26-pages", 64, "shared load requests", 100, 1000) ==
        "0: 900 switched off");
  CHECK(explained(cache(20, 58 * 8 * 2, "kv-heads=1"), "26-pages", 64, "shared load requests", 100,
                  970, "kv-heads=1") == "0: 870 switched off");
  const std::string split =
      "tile 27-split-kv rows 256\n" +
      count("27-split-kv", "emulator", 64, "block barriers", 4 * 8 * 4) +
      count("27-split-kv", "emulator", 64, "atomics", 4) +
      count("27-split-kv", "emulator", 64, "global store requests", 8, "", "store_part") +
      count("27-split-kv", "emulator", 64, "global store sectors", 99, "", "store_part");
  CHECK(explained(split, "27-split-kv", 64, "shared load requests", 100, 228) ==
        "0: 128 switched off");
  CHECK(explained(split, "27-split-kv", 64, "global store requests", 10, 34) ==
        "0: a part's 16 bytes in four stores");
  CHECK(explained(split, "27-split-kv", 64, "global store sectors", 120, 417) ==
        "0: a part's 16 bytes in four stores");
  CHECK(explained(split, "27-split-kv", 64, "global bytes written", 3840, 13344) ==
        "0: a part's 16 bytes in four stores");
  // 4 blocks with two fences each; Q is put into shared memory at two places.
  const std::string model =
      tiles("50-in-a-model") + count("50-in-a-model", "emulator", 64, "atomics", 4) +
      count("50-in-a-model", "emulator", 64, "shared store requests", 5, "", "store_rotated_1") +
      count("50-in-a-model", "emulator", 64, "shared store requests", 2, "", "store_rotated_2");
  CHECK(explained(model, "50-in-a-model", 64, "shared load requests", 100, 132) ==
        "0: 32 switched off");
  CHECK(explained(model, "50-in-a-model", 64, "shared store requests", 10, 31) ==
        "0: 16 bytes of Q in four stores");
  CHECK(explained(model, "50-in-a-model", 64, "shared store wavefronts", 40, 124) ==
        "0: 16 bytes of Q in four stores");
  // Of each sequence and head 3 blocks: of 384, 129 and no rows 3, 2 and none do not leave.
  const std::string strides = tiles("22-strides", "warps 4");
  const std::string lengths = "\"lengths=384,129:7,0\"";
  CHECK(explained(strides, "22-strides", 64, "global load requests", 1000, 952, lengths) ==
        "0: not loaded by blocks that leave");
  CHECK(explained(strides, "22-strides", 64, "global bytes read", 32000, 30464, lengths) ==
        "0: not loaded by blocks that leave");
  CHECK(explained(strides, "22-strides", 64, "global load requests", 1000, 951, lengths) ==
        "1: not loaded by blocks that leave; -1 NOT EXPLAINED");
}

TEST_CASE("truth: all counts, with and without ncu") {
  CHECK(awk("-v all=1 -f common/measure/truth.awk", {both("13-lane-map", 64, "mma", 7, 7)}).out ==
        "  batch 1, heads 3, seqlen 384, head dim 64: 1 of 1 counts are equal\n"
        "    13-lane-map, mma: emulator 7, ncu 7: equal\n");
  CHECK(
      awk("-v all=1 -f common/measure/truth.awk", {count("13-lane-map", "emulator", 64, "mma", 7)})
          .out ==
      "  batch 1, heads 3, seqlen 384, head dim 64: not measured\n"
      "    13-lane-map, mma: emulator 7\n");
}

TEST_CASE("scripts: what measures says so where there is nothing to measure with") {
  for (const std::string script :
       {"bench", "bench-models", "bench-hopper", "bench-decode", "bench-dims", "bench-backward",
        "ceilings", "cycles", "sustained"}) {
    const Finished finished = run_command("GPU= NVCC= common/measure/" + script + ".sh 00-x");
    CHECK(finished.status == 3);
    CHECK(finished.out == "");
    CHECK(finished.err == "make " + script + ": no GPU here\n");
  }
}

namespace {

/// A folder in which rounds.py measures programs that say what a test wants: each row's milliseconds, in turn, and as
/// many million clocks.
struct Rounds {
  const fs::path folder = fs::temp_directory_path() / ("rounds." + std::to_string(getpid()));

  Rounds() {
    fs::create_directories(folder / "build");
    stub("nvidia-smi",
         "echo 600.5, 1980; [ $# = 4 ] || while sleep 0.01; do echo 600.5, 1980; done");
  }
  Rounds(const Rounds &) = delete;
  Rounds &operator=(const Rounds &) = delete;
  ~Rounds() { fs::remove_all(folder); }

  void stub(const std::string &name, const std::string &text) const {
    std::ofstream(folder / name) << "#!/bin/sh\n" << text << "\n";
    fs::permissions(folder / name, fs::perms::owner_all);
  }
  /// A program whose first time, which is not recorded, and then times are these.
  void program(const std::string &name, const std::string &step, const std::string &ms,
               const std::string &end = "exit 0", const std::string &operations = "1e9") const {
    stub(name,
         "for word; do csv=$word; done; echo 'check    right'; set -- " + ms +
             "\nwhile read n; do\nsleep 0.04; [ -e $csv ] || echo "
             "step,device,batch,heads,seqlen,head_dim," +
             "options,operations,kv_bytes,median_ms,min_ms,sm_clocks,tflops,rms_error >$csv\n" +
             "echo '" + step + ",GPU,1,1,64,64,," + operations +
             ",1,'$1,$1,${1}e6,1,1e-6 >>$csv\n" +
             "echo \"$0 $n\" >>order; shift; echo 'speed    1'; done; " + end);
  }
  Finished run(const std::string &plan, const std::string &arguments) const {
    fs::remove(folder / "order");
    return run_command(
        "d=$PWD; cd " + shell_word(folder.string()) + " && printf %b '" + plan +
        "' | PATH=$PWD:$PATH SUSTAINED='0 0.02 0.04' python3 $d/common/measure/rounds.py " +
        arguments);
  }
  std::string text(const std::string &name) const { return read_text(folder / name); }
};

}  // namespace

TEST_CASE("rounds: programs alternate, and what the control's noise hides is level") {
  if (run_command("python3 --version").status != 0) return void(std::puts("SKIP: no python3"));
  const Rounds r;
  // The control is up to 2% off; 'noise' is 1% faster in every round, 'unsteady' is mostly.
  r.program("step-97", "97-before", "40 40 40 40", "exit 0", "2e9");  // in 20 what the others do
  r.program("step-98", "98-idea", "100 10.1 10 10");
  r.program("step-98-fast", "98-idea:fast", "4 5 5 5");
  r.program("step-98-noise", "98-idea:noise", "9 9.999 9.9 9.9");
  r.program("step-98-unsteady", "98-idea:unsteady", "9 8 12 8");
  r.stub("step-98-large", "echo too large >&2; exit 3");
  const std::string all =
      "./step-97 ./step-98 ./step-98-fast ./step-98-noise ./step-98-unsteady ./step-98-large ";
  const auto compare = [&](const std::string &control) {
    r.program("control/step-98", "98-idea", control);
    return r.run("--causal|" + all + "control/step-98\\n", "variants --rounds 3 --step 98 out.csv");
  };
  fs::create_directories(r.folder / "control");
  const Finished finished = compare("10 10.1 10.2 10");
  CHECK(finished.status == 0);
  CHECK(finished.err.find("[7 of 7, ") != std::string::npos);
  CHECK(finished.err.find("too large\n") != std::string::npos);
  CHECK(finished.err.find("] left out, as it said\n") != std::string::npos);
  const std::vector<std::string> lines = lines_of(finished.out);
  REQUIRE(lines.size() == 9);
  CHECK(lines[0] == "batch 1, heads 1, seqlen 64, head dim 64");
  CHECK(lines[2] == "  97-before         40    0.5× (0.5 to 0.505)  40000000  0.5× (0.5 to 0.505)");
  const std::vector<std::string> rows = lines_of(r.text("out.csv"));
  REQUIRE(rows.size() == 7);
  const auto row = [&](const std::string &step) {
    for (const std::string &line : rows)
      if (line.starts_with(step + ",")) return line;
    return std::string();
  };
  // The first launch is not recorded; each launch count follows from it.
  CHECK(row("98-idea").starts_with(
      "98-idea,GPU,1,1,64,64,,1e9,1,3,10,10,0.1,10000000,10000000,10100000,1000,1980,600.5,"));
  CHECK(row("98-idea").ends_with(",,1,1,,1,1,1×,1×"));
  CHECK(row("98-idea:fast").find(",2,2,2.02,2,2,2.02,2× (2 to 2.02),2× (2 to 2.02)") !=
        std::string::npos);
  CHECK(row("98-idea:noise").find(",,1.0101,1.0101,,1.0101,1.0101,level,level") !=
        std::string::npos);
  CHECK(row("98-idea:unsteady").ends_with(",level,level"));
  CHECK(row("98-idea:control").ends_with(",\"level, to 2%\",\"level, to 2%\""));
  // Each round in another order.
  const std::vector<std::string> order = lines_of(r.text("order"));
  REQUIRE(order.size() == 4 * 6);
  std::set<std::vector<std::string>> orders;
  const auto sorted = [](std::vector<std::string> of) {
    return std::sort(of.begin(), of.end()), of;
  };
  for (std::size_t i = 6; i < order.size(); i += 6) {
    const std::vector<std::string> round(order.begin() + i, order.begin() + i + 6);
    orders.insert(round);
    CHECK(sorted(round) ==
          sorted({"./step-97 5", "./step-98 2", "./step-98-fast 50", "./step-98-noise 22",
                  "./step-98-unsteady 22", "control/step-98 20"}));
  }
  CHECK(orders.size() == 3);
  // Beside a control without noise the same percent is a difference.
  CHECK(compare("10 10.1 10 10").status == 0);
  CHECK(r.text("out.csv").find("98-idea:noise") != std::string::npos);
  CHECK(r.text("out.csv").find(",1.01× (1.01 to 1.01),1.01× (1.01 to 1.01)\n") !=
        std::string::npos);
  // A wrong answer after the launches leaves the file as it was.
  const std::string before = r.text("out.csv");
  r.program("step-98-fast", "98-idea:fast", "4 1 1 1", "exit 1");
  const Finished wrong = compare("10 10.1 10 10");
  CHECK(wrong.status == 1);
  CHECK(wrong.err.ends_with(
      "FAILED: ./step-98-fast --causal: after its launches the answer is wrong\n"));
  CHECK(r.text("out.csv") == before);
  // And so does one before them.
  r.stub("step-98-fast", "exit 1");
  const Finished failed = compare("10 10.1 10 10");
  CAPTURE(failed.err);
  // (Another program may say last that it does not take the problem.)
  CHECK(contains(failed.err, "FAILED: ./step-98-fast --causal: exit status 1\n"));
  CHECK(r.text("out.csv") == before);
}

TEST_CASE(
    "rounds: a piece of make cycles joins the others, and make sustained takes its own time") {
  if (run_command("python3 --version").status != 0) return void(std::puts("SKIP: no python3"));
  const Rounds r;
  r.program("step-97", "97-before", "20 20 21 23");
  r.program("step-98", "98-idea", "9 10 11 11");
  const auto row = [&](const std::string &text) {
    return r.text("out.csv").find("\n" + text + ",600.5,1e-6\n") != std::string::npos;
  };
  const std::string old =
      "97-before,GPU,1,1,64,64,,1e9,1,3,21,20,0.047619,21000000,20000000,23000000,1000,1980";
  CHECK(r.run("|./step-98\\n", "cycles --rounds 3 out.csv").status == 0);
  CHECK(r.run("|./step-97\\n", "cycles --rounds 3 out.csv").status == 0);
  CHECK(lines_of(r.text("out.csv")).size() == 3);
  CHECK(lines_of(r.text("out.csv"))[1].starts_with("97-"));
  CHECK(row(old));
  CHECK(row("98-idea,GPU,1,1,64,64,,1e9,1,3,11,10,0.0909091,11000000,10000000,11000000,1000,1980"));
  r.program("step-98", "98-idea", "9 7 7 7");
  CHECK(r.run("|./step-98\\n", "cycles --rounds 3 out.csv").status == 0);
  CHECK(lines_of(r.text("out.csv")).size() == 3);
  CHECK(row(old));
  CHECK(row("98-idea,GPU,1,1,64,64,,1e9,1,3,7,7,0.142857,7000000,7000000,7000000,1000,1980"));

  // 20 ms of warm-up and 40 ms recorded, of launches of 2 ms; what the program does not say of its inputs is added.
  r.program("step-98", "98-idea", "2 5 4 5 4.5");
  CHECK(r.run("--inputs one-hot --seqlen 64|./step-98|no-such-peer\\n",
              "sustained --rounds 2 out.csv")
            .status == 0);
  CHECK(lines_of(r.text("order")) == std::vector<std::string>{"./step-98 1", "./step-98 10",
                                                              "./step-98 20", "./step-98 5",
                                                              "./step-98 10"});
  CHECK(
      row("98-idea,GPU,1,1,64,64,inputs=one-hot,1e9,1,2,4.25,4,0.235294,4250000,4000000,4500000,"
          "1000,1980"));
}

TEST_CASE("cycles and sustained: what is measured") {
  const fs::path folder = fs::temp_directory_path() / ("plan." + std::to_string(getpid()));
  fs::create_directories(folder);
  const std::string python = (folder / "python").string();
  std::ofstream(python) << "#!/bin/sh\necho \"$@\"; cat\n";
  fs::permissions(python, fs::perms::owner_all);
  const auto plan = [&](const std::string &script) {
    return run_command("GPU=x NVCC=nvcc PYTHON=" + shell_word(python) + " " + script).out;
  };
  CHECK(plan("common/measure/cycles.sh 02-loop-inverted 31-wgmma") ==
        "common/measure/rounds.py cycles --rounds 7 plots/results/x-cycles.csv\n--batch "
        "1|./step-02\n|./step-31\n");
  CHECK(plan("SHAPES='--batch 4; --head-dim 64' REPEAT=9 common/measure/cycles.sh 02-loop-inverted "
             "31-wgmma") ==
        "common/measure/rounds.py cycles --rounds 9 plots/results/x-cycles.csv\n"
        "--batch 4|./step-02 ./step-31\n --head-dim 64|./step-02 ./step-31\n");
  // Of Parts I to IV, whatever the parts after them have.
  CHECK(plan("common/measure/sustained.sh 02-loop-inverted 15-early-k 16-late-copies 20-causal "
             "41-handover 46-window 64-tiles 89-rotation") ==
        "common/measure/rounds.py sustained --rounds 2 plots/results/x-sustained.csv\n"
        "--type bf16 --head-dim 128 |./step-46|flash-attention-3-bf16 flash-attn-4 cudnn\n"
        "--type bf16 --head-dim 64 |./step-46|flash-attention-3-bf16 flash-attn-4 cudnn\n"
        "--head-dim 128 |./step-41|flash-attention-3-fp8\n"
        "--type bf16 --head-dim 128 --causal|./step-46|flash-attention-3-bf16 flash-attn-4 cudnn\n"
        "--type bf16 --head-dim 64 --causal|./step-46|flash-attention-3-bf16 flash-attn-4 cudnn\n"
        "--head-dim 128 --causal|./step-41|flash-attention-3-fp8\n"
        "--head-dim 128|./step-16|flash-attention-2 cudnn\n"
        "--head-dim 64|./step-16|flash-attention-2 cudnn\n"
        "loop|mma mma-zeros\n");
  CHECK(plan("SHAPES='--batch 16; --inputs one-hot' common/measure/sustained.sh 15-early-k") ==
        "common/measure/rounds.py sustained --rounds 2 plots/results/x-sustained.csv\n"
        "--batch 16|./step-15\n --inputs one-hot|./step-15\n");
  fs::remove_all(folder);
}

TEST_CASE(
    "check-gpu: each check is a line that says how far it is, and one that fails its command") {
  const Finished without = run_command("GPU= NVCC=nvcc common/measure/check-gpu.sh tests 00");
  CHECK(without.status == 2);
  CHECK(without.out + without.err == "make check-gpu: no GPU (nvidia-smi finds none)\n");
  const fs::path folder = fs::temp_directory_path() / ("check-gpu." + std::to_string(getpid()));
  fs::create_directories(folder);
  const auto stub = [&](const std::string &name, const std::string &text) {
    std::ofstream(folder / name) << "#!/bin/sh\n" << text << "\n";
    fs::permissions(folder / name, fs::perms::owner_all);
  };
  const std::string path = "PATH=" + shell_word(folder.string()) + ":$PATH ";
  const auto check = [&] {
    return run_command(path + "GPU=a100 NVCC=nvcc ANY_PROBLEM=any SANITIZE='memcheck racecheck' " +
                       "common/measure/check-gpu.sh tests 30 98 99");
  };
  stub("nvidia-smi", "echo 8.0");  // and no deadlocks
  stub("compute-sanitizer", "echo \"$@\"");
  stub("tests", "echo $STEPS_ONLY; [ $STEPS_ONLY = 99 ] && echo SKIP: too old || true");
  const Finished right = check();
  CHECK(right.status == 0);
  const std::vector<std::string> lines = lines_of(right.out);
  REQUIRE(lines.size() == 16);
  for (int i = 0; i < 16; i++)
    CHECK(lines[i].starts_with("[" + std::to_string(i + 1) + " of 16, "));
  CHECK(lines[0].find("] deadlocks: SKIP: ") != std::string::npos);
  CHECK(right.out.find("] any-problem, racecheck: right, ") != std::string::npos);
  CHECK(right.out.find("] 99, alone: right, ") != std::string::npos);
  CHECK(lines[13].find("] 99, large: right, ") != std::string::npos);
  CHECK(lines[13].ends_with(" s; SKIP: too old"));

  stub("tests", "echo what it says; [ $STEPS_ONLY != 98 ] || [ -z \"$STEPS_PREFIX\" ]");
  const Finished wrong = check();
  CHECK(wrong.status == 1);
  CHECK(wrong.out.find("\nFAIL ANY_PROBLEM=any STEPS_DEVICE=gpu STEPS_PREFIX='common/measure/"
                       "check-gpu.sh --under racecheck' STEPS_ONLY=98 tests --test-case='every "
                       "step is right*'\n\twhat it says\n") != std::string::npos);

  // A tool that reports what is no fault of a step is not run, and the chapter is named.
  stub("tests",
       "[ $STEPS_ONLY != 64 ] || [ \"$STEPS_PREFIX\" != 'common/measure/check-gpu.sh --under "
       "racecheck' ]");
  const Finished leaves_out =
      run_command(path + "GPU=a100 NVCC=nvcc ANY_PROBLEM=any SANITIZE='memcheck racecheck' " +
                  "common/measure/check-gpu.sh tests 64 65");
  CHECK(leaves_out.status == 0);
  CHECK(
      leaves_out.out.find("] 64, racecheck: left out, it reports what is no fault: chapter 64\n") !=
      std::string::npos);
  CHECK(leaves_out.out.find("] 64, memcheck: right, ") != std::string::npos);
  CHECK(leaves_out.out.find("] 65, racecheck: right, ") != std::string::npos);

  // Where a step has a variant that racecheck can follow, it checks that.
  const std::string program = (folder / "step-98").string();
  const auto under = [&](const std::string &tool) {
    return run_command(path + "common/measure/check-gpu.sh --under " + tool + " " + program).out;
  };
  const std::string command = " --error-exitcode 9 " + program;
  CHECK(under("racecheck") == "--tool racecheck" + command + "\n");
  stub("step-98-each-arrives", "");
  CHECK(under("racecheck") == "--tool racecheck" + command + "-each-arrives\n");
  CHECK(under("memcheck") == "--tool memcheck" + command + "\n");
  fs::remove_all(folder);
}

TEST_CASE("check-deadlock: a run must end by itself, with exit status 1 and one line") {
  const fs::path folder = fs::temp_directory_path() / ("deadlock." + std::to_string(getpid()));
  fs::create_directories(folder);
  const auto stub = [&](const std::string &name, const std::string &text) {
    std::ofstream(folder / name) << "#!/bin/sh\n" << text << "\n";
    fs::permissions(folder / name, fs::perms::owner_all);
  };
  const auto check = [&](const std::string &gpu, const std::string &nvcc) {
    return run_command("PATH=" + shell_word(folder.string()) + ":$PATH GPU=" + gpu +
                       " NVCC=" + nvcc + " common/measure/deadlock.sh");
  };
  const std::string skip = "SKIP: deadlocks on a GPU: ";
  const std::string failed = "echo 'step: the kernel failed: unspecified launch failure' >&2; ";
  stub("make", "");
  stub("timeout", failed + "exit 1");
  stub("nvidia-smi", "echo 8.0");
  CHECK(check("", "nvcc").out == skip + "no GPU here\n");
  CHECK(check("h200", "").out == skip + "nvcc is not on the PATH\n");
  CHECK(check("a100", "nvcc").out ==
        skip + "the GPU is of compute capability 8.0, and mbarriers wait in steps for 9.0\n");
  CHECK(check("a100", "nvcc").status == 0);

  stub("nvidia-smi", "echo 9.0");
  const Finished ended = check("h200", "nvcc");
  CHECK(ended.status == 0);
  CHECK(lines_of(ended.out).size() == 2);
  CHECK(ended.out.find("s: step: the kernel failed: unspecified launch failure\n") !=
        std::string::npos);
  for (const std::string &otherwise :
       {std::string("exit 0"), std::string("exit 124"), std::string("exit 1"), failed + "exit 0",
        failed + "echo more >&2; exit 1", std::string("echo 'step: WRONG' >&2; exit 1")}) {
    CAPTURE(otherwise);
    stub("timeout", otherwise);
    const Finished finished = check("h200", "nvcc");
    CHECK(finished.status == 1);
    CHECK(finished.out.find("30, a byte too many expected: FAILED: exit status ") !=
          std::string::npos);
    CHECK(finished.out.find("36, nobody says that Q is empty: FAILED: exit status ") !=
          std::string::npos);
  }
  stub("timeout", failed + "exit 1");
  stub("make", "echo 'an error of nvcc'; exit 2");
  const Finished uncompiled = check("h200", "nvcc");
  CHECK(uncompiled.status == 1);
  CHECK(uncompiled.out.find("an error of nvcc\n") != std::string::npos);
  stub("make", "");
  for (const std::string tool : {"mkdir", "awk"}) {  // the copy of another time is not run
    CAPTURE(tool);
    stub(tool, "exit 1");
    const Finished finished = check("h200", "nvcc");
    fs::remove(folder / tool);
    CHECK(finished.status == 1);
    CHECK(finished.out == "");
  }
  fs::remove_all(folder);
}

TEST_CASE("scripts: what is not there is refused in one line") {
  const auto refusal = [](const std::string &script) {
    const Finished finished = run_command("common/measure/" + script);
    CHECK(finished.status == 2);
    CHECK(finished.out == "");
    CHECK(lines_of(finished.err).size() == 1);
    return finished.err;
  };
  CHECK(refusal("sass.sh 99").starts_with("make sass-99: no such step; there are 00 01"));
  CHECK(refusal("sass.sh 15-padded").starts_with("make sass-15-padded: no such step;"));
  CHECK(refusal("diff.sh 99").starts_with("make diff-99: no such step; there are 00 01"));
  CHECK(refusal("truth.sh no-such-gpu.csv").starts_with("make truth: no-such-gpu.csv: "));
}

TEST_CASE("scripts: what only moved to a header is no change") {
  const fs::path folder = fs::temp_directory_path() / ("moved." + std::to_string(getpid()));
  fs::create_directories(folder);
  const auto moved = [&](const std::string &after, const std::string &held,
                         const std::string &before) {
    std::ofstream(folder / "after") << after;
    std::ofstream(folder / "held") << held;
    std::ofstream(folder / "before") << before;
    const auto file = [&](const std::string &name) { return (folder / name).string(); };
    return run_command("awk -f common/measure/moved.awk file=1 " + file("after") + " file=2 " +
                       file("held") + " file=3 " + file("before") + " 2>" + file("count") +
                       "; cat " + file("count"))
        .out;
  };
  const std::string four = "int f() {\n  g();\n  return h();\n}\n";
  CHECK(moved("int main() {}\n", "static\n" + four, "x;\n  " + four + "\ny;\n") == "x;\n\ny;\n4\n");
  // Three lines, lines that the header has not, and lines that stand in the step still, are no move.
  CHECK(moved("", "a;\nb;\nc;\n", "a;\nb;\nc;\n") == "a;\nb;\nc;\n0\n");
  CHECK(moved("", "", four) == four + "0\n");
  CHECK(moved(four, four, four) == four + "0\n");
  fs::remove_all(folder);
}

/// As a reader types it, not as a part of the make that runs the tests.
Finished make(const std::string &arguments) {
  return run_command("env -u MAKEFLAGS -u MAKELEVEL make " + arguments);
}

TEST_CASE("make: what a target lacks is said in one line, before anything is built") {
  const auto refusal = [](const std::string &arguments) {
    const Finished finished = make(arguments);
    CHECK(finished.status == 2);
    CHECK(finished.out == "");
    CHECK(lines_of(finished.err).size() == 1);
    return finished.err;
  };
  const auto refuses = [&](const std::string &arguments, const std::string &words) {
    const std::string said = refusal(arguments);
    CHECK_MESSAGE(said.find(words) != std::string::npos, said);
  };
  for (const std::string target : {"step-99", "try-99", "check-99", "answer-99-1", "diff-99",
                                   "variants-99", "sass-99", "step-99-padded"})
    refuses(target, "make " + target + ": there is no step 99. The steps are 00 01 02");
  for (const std::string target : {"step-5", "check-5", "answer-5-1"})
    refuses(target, "make " + target + ": there is no step 5: write 05.");
  for (const std::string target : {"step-", "check-", "try-"})
    refuses(target, "make " + target + ": there is no step without a number. The steps are 00");
  refuses("STEPS='05 6'", "STEPS=6: there is no step 6: write 06.");
  refuses("STEPS=05 step-06", "make step-06: STEPS leaves it out");
  refuses("STEPS=05 check-docs", "make check-docs: STEPS cannot be used here, because the pages");
  refuses("STEPS=05 test", "make test: STEPS cannot be used here; STEPS_ONLY=06 chooses a step");
  refuses("CXX= step-00", "CXX is empty: CXX=g++ or CXX=clang++ names the compiler");
  refuses("no-command", "make no-command: there is no such command, and no such file; make help");
  refuses("step-16-nothing", "make step-16-nothing: step 16 has no such variant. It has: ");
  refuses("variants-02", "make variants-02: step 02 has no variants");
  for (const std::string target :
       {"bench", "bench-models", "bench-hopper", "bench-decode", "bench-dims", "bench-backward",
        "bench-gpus", "ceilings", "bench-library", "cycles", "sustained", "check-gpu", "check-gpus",
        "check-deadlock", "racecheck"})
    refuses("GPU= " + target, "make " + target + ": there is no GPU here");
  for (const std::string target : {"regs", "sass-16"})
    refuses("NVCC=/no/nvcc " + target, "make " + target + ": NVCC=/no/nvcc: there is no such");
  for (const std::string target : {"bench", "check-gpu", "regs", "sass-16"})
    refuses("GPU=x NVCC= " + target, "make " + target + ": nvcc is not on the PATH");
  for (const std::string target : {"check-gpus", "bench-gpus"})
    refuses("GPU=x NVCC=x NCCL= PYTHON=no-python " + target,
            "make " + target + ": it needs NCCL (sudo apt-get install libnccl-dev, or pip ");
  refuses("PYTHON=no-python plot", "make plot: it needs matplotlib");
  refuses("counters STEPS=36", "make counters: STEPS needs SHAPES=");
}

TEST_CASE("make: Part VII is built with NCCL's wheel, and without NCCL for the emulator") {
  const fs::path wheel = "build/nccl-wheel", header = wheel / "include/nccl.h";
  fs::create_directories(header.parent_path());
  std::ofstream(header) << "";
  const auto dry_run = [](const std::string &python, const std::string &target) {
    return make("--dry-run NVCC=x ARCH=sm_90 NCCL= PYTHON=" + shell_word(python) + " " + target);
  };
  const std::string program = "build/cuda-sm_90/bin/step-71";
  const Finished with = dry_run("echo build/nccl-wheel;:", program);
  CHECK(with.out.find(" -Ibuild/nccl-wheel/include ") != std::string::npos);
  CHECK(with.out.find(" -Lbuild/nccl-wheel/lib -l:libnccl.so.2 ") != std::string::npos);
  const Finished without = dry_run("no-python", "step-71");
  CHECK(without.out.find("step 71 needs NCCL (sudo apt-get install libnccl-dev, or pip install "
                         "nvidia-nccl-cu13): ./step-71 is for the emulator, as ./step-71 --device "
                         "cpu --gpus 4") != std::string::npos);
}

TEST_CASE("make: no line of the Makefile is longer than 120 columns") {
  for (const std::string &line : lines_of(read_text("Makefile")))
    CHECK_MESSAGE(line.size() <= 120, line);
}

TEST_CASE("make: a compiler that is not there, or refuses its flags, makes no object old") {
  const fs::path flags = "build/host/flags";
  const auto before = fs::last_write_time(flags);
  for (const std::string typo : {"CXX=no-such-compiler", "CXXFLAGS=-Obad"}) {
    CHECK(make(typo + " " + flags.string()).status == 2);
    CHECK(fs::last_write_time(flags) == before);
  }
}

TEST_CASE("make: a compiler that is too old is refused in one line") {
  const fs::path compiler = fs::temp_directory_path() / ("old." + std::to_string(getpid()));
  const auto says = [&](const std::string &macros) {
    std::ofstream(compiler) << "#!/bin/sh\nprintf '" + macros + "'\n";
    fs::permissions(compiler, fs::perms::owner_all);
    const Finished finished = make("CXX=" + compiler.string() + " build/host/flags");
    CHECK(finished.status == 2);
    return finished.err;
  };
  const auto before = fs::last_write_time("build/host/flags");
  for (const std::string old :
       {"#define __GNUC__ 10\\n", "#define __GNUC__ 4\\n#define __clang_major__ 15\\n"})
    CHECK(says(old).starts_with("CXX=" + compiler.string() + " is too old: g++ 11 or later"));
  CHECK(fs::last_write_time("build/host/flags") == before);
  fs::remove(compiler);
}

TEST_CASE("make: an ARCH that is none is refused in one line") {
  const auto dry_run = [](const std::string &arch) {
    return make("--dry-run help ARCH=" + shell_word(arch));
  };
  for (const std::string arch : {"bogus", "80", "sm_", "sm_80,sm_90", "sm_90x", "sm_80 bogus"}) {
    const Finished finished = dry_run(arch);
    CHECK(finished.status == 2);
    CHECK(finished.out == "");
    CHECK(lines_of(finished.err).size() == 1);
    CHECK(finished.err.find("ARCH=" + arch + ": sm_NN is allowed") != std::string::npos);
  }
  for (const std::string arch : {"", "sm_75", "sm_90a", " sm_80  sm_100f "})
    CHECK(dry_run(arch).status == 0);
}

// SPDX-License-Identifier: MIT
// What `make regs` prints of a kernel: regs.awk, given a piece of PTX and of what ptxas -v says.
#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/testing/process.h"

namespace fs = std::filesystem;

namespace {

const std::string kNamespace = "(anonymous namespace)::";

struct Kernel {
  std::string name;
  int threads;  // 0: no __launch_bounds__
  int registers, dynamic_bytes, static_bytes, spill_stores, spill_loads;
};

/// What regs.awk makes of one step, of which ptxas also says this.
Finished regs(const std::string &arch, const std::vector<Kernel> &kernels,
              const std::string &step = "07-some-step", const std::string &said = "") {
  std::string ptx, log;
  for (const Kernel &k : kernels) {
    ptx += "\t.entry " + kNamespace + k.name + "(\n\t.param .u64 p\n)\n";
    if (k.threads) ptx += ".maxntid " + std::to_string(k.threads) + ", 1, 1\n.minnctapersm 2\n";
    ptx += "{\n\t// begin inline asm\n";
    if (k.dynamic_bytes) ptx += "\t// shared memory: " + std::to_string(k.dynamic_bytes) + "\n";
    ptx += "\t// end inline asm\n\tret;\n}\n";
    log = "ptxas info    : Compiling entry function '" + kNamespace + k.name + "' for '" + arch +
          "'\nptxas info    : Function properties for " + kNamespace + k.name +
          "\n    24 bytes stack frame, " + std::to_string(k.spill_stores) +
          " bytes spill stores, " + std::to_string(k.spill_loads) +
          " bytes spill loads\nptxas info    : Used " + std::to_string(k.registers) +
          " registers, used 1 barriers, 24 bytes cumulative stack size" +
          (k.static_bytes ? ", " + std::to_string(k.static_bytes) + " bytes smem" : "") + "\n" +
          log;  // ptxas goes from the last to the first
  }
  const fs::path file =
      fs::temp_directory_path() / ("regs." + std::to_string(getpid())) / (step + ".txt");
  fs::create_directories(file.parent_path());
  std::ofstream(file) << ptx + said + log;
  const Finished run =
      run_command("awk -f common/measure/regs.awk -v arch=" + arch + " " + file.string());
  fs::remove_all(file.parent_path());
  return run;
}

/// The lines of its table, without the heading.
std::vector<std::string> table(const std::string &arch, const std::vector<Kernel> &kernels) {
  const Finished run = regs(arch, kernels);
  REQUIRE(run.status == 0);
  CHECK(run.err == "");
  std::vector<std::string> lines = lines_of(run.out);
  REQUIRE(lines.size() == 2 + kernels.size());
  CHECK(lines[0].starts_with("for " + arch + " "));
  lines.erase(lines.begin(), lines.begin() + 2);
  return lines;
}

/// A line, its columns set apart by one space.
std::string line(const std::string &arch, const Kernel &kernel) {
  const std::vector<std::string> lines = table(arch, {kernel});
  std::string words;
  for (const char c : lines[0])
    if (c != ' ' || words.back() != ' ') words += c;
  return words;
}

}  // namespace

// The numbers of blocks are those of cuda_occupancy.h.
TEST_CASE("regs: what limits the blocks of a multiprocessor") {
  CHECK(line("sm_90", {"attention<128>", 128, 255, 65536, 0, 0, 0}) ==
        "07-some-step attention<128> 255 64.0 2 8 registers 0 0");
  CHECK(line("sm_90", {"attention<64>", 128, 128, 81920, 0, 0, 0}) ==
        "07-some-step attention<64> 128 80.0 2 8 shared memory 0 0");
  CHECK(line("sm_90", {"attention<64>", 128, 168, 0, 0, 0, 0}) ==
        "07-some-step attention<64> 168 0.0 3 12 registers 0 0");
  CHECK(line("sm_90", {"softmax", 256, 32, 0, 64, 0, 0}) ==
        "07-some-step softmax 32 0.1 8 64 warps 0 0");
  CHECK(line("sm_90", {"tiny", 32, 16, 0, 0, 0, 0}) == "07-some-step tiny 16 0.0 32 32 blocks 0 0");
  CHECK(line("sm_90a", {"tiny", 32, 16, 0, 0, 0, 0}) ==
        "07-some-step tiny 16 0.0 32 32 blocks 0 0");
  CHECK(line("sm_89", {"tiny", 32, 16, 0, 0, 0, 0}) == "07-some-step tiny 16 0.0 24 24 blocks 0 0");
  // A quarter of the multiprocessor has registers for 6 warps of 80, not for 6 and a quarter.
  CHECK(line("sm_90", {"tiny", 32, 80, 0, 0, 0, 0}) ==
        "07-some-step tiny 80 0.0 24 24 registers 0 0");
  // Rounded up to the next 128 bytes, or to the next 256, there is one block less.
  CHECK(line("sm_90", {"tiny", 32, 16, 32329, 0, 0, 0}) ==
        "07-some-step tiny 16 31.6 6 6 shared memory 0 0");
  CHECK(line("sm_75", {"tiny", 32, 16, 9344, 0, 0, 0}) ==
        "07-some-step tiny 16 9.1 6 6 shared memory 0 0");
  // 100 KB: three blocks of 32.33 KB, if there were not 1 KB of each for the system.
  CHECK(line("sm_86", {"attention<64>", 128, 64, 33000, 0, 0, 0}) ==
        "07-some-step attention<64> 64 32.2 3 12 shared memory 0 0");
  CHECK(line("sm_86", {"attention<64>", 128, 64, 33152, 0, 0, 0}) ==
        "07-some-step attention<64> 64 32.4 2 8 shared memory 0 0");
  CHECK(line("sm_75", {"attention<64>", 128, 64, 32768, 0, 0, 0}) ==
        "07-some-step attention<64> 64 32.0 2 8 shared memory 0 0");
  CHECK(line("sm_75", {"attention<128>", 128, 64, 75776, 0, 0, 0}) ==
        "07-some-step attention<128> 64 74.0 0 0 shared memory 0 0");
}

TEST_CASE("regs: a spill shows, and so does what is not known") {
  CHECK(line("sm_80", {"attention<128>", 128, 255, 65536, 0, 52, 44}) ==
        "07-some-step attention<128> 255 64.0 2 8 registers 52 44 SPILLS");
  CHECK(line("sm_80", {"transpose", 0, 32, 2176, 0, 0, 0}) ==
        "07-some-step transpose 32 2.1 ? ? (no bounds) 0 0");
  CHECK(line("sm_123", {"tiny", 32, 16, 0, 0, 0, 0}) ==
        "07-some-step tiny 16 0.0 ? ? (sm_123) 0 0");
}

TEST_CASE("regs: a line for each kernel, in the order of the source") {
  const std::vector<std::string> lines =
      table("sm_90", {{"scores<64>", 128, 21, 20480, 0, 0, 0}, {"softmax", 256, 32, 64, 0, 0, 8}});
  CHECK(lines[0].find(" scores<64> ") != std::string::npos);
  CHECK(lines[1].find(" softmax ") != std::string::npos);
  CHECK(lines[1].ends_with("  SPILLS"));
  CHECK(lines[0].find("SPILLS") == std::string::npos);
}

TEST_CASE("regs: a step from 30 on that spills on Hopper is an error, one before it is none") {
  const std::vector<Kernel> kernels = {{"attention<64>", 384, 168, 65536, 0, 0, 0},
                                       {"attention<128>", 384, 168, 65536, 0, 1224, 1464}};
  CHECK(regs("sm_90", kernels, "29-some-step").status == 0);
  const Finished finished = regs("sm_90", kernels, "30-some-step");
  CHECK(finished.status == 1);
  CHECK(finished.err ==
        "make regs: 30-some-step: attention<128> spills, and from step 30 on no "
        "kernel for Hopper may\n");
  CHECK(regs("sm_80", kernels, "50-some-step").status == 0);
  CHECK(lines_of(finished.out).size() == 4);  // the table all the same
  CHECK(regs("sm_90", {kernels[0]}, "36-some-step").status == 0);
}

TEST_CASE("regs: what ptxas says of wgmma and setmaxnreg is an error") {
  const std::vector<Kernel> kernels = {{"attention<64>", 384, 168, 65536, 0, 0, 0}};
  for (const std::string said :
       {"(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "non wgmma instructions defining accumulator registers of a wgmma between start and end "
        "of the pipeline stage in the function 'attention<64>'",
        "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the function 'attention<64>'",
        "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "the presence of Extern calls in the function 'attention<64>'",
        "(C7517) warpgroup.wait is injected in around line 233 by compiler to allow use of "
        "registers defined by GMMA in function 'attention<64>'",
        "(C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register "
        "requirements."})
    for (const std::string kind : {"info    ", "warning "}) {
      const Finished finished =
          regs("sm_90", kernels, "31-some-step", "ptxas " + kind + ": " + said + "\n");
      CHECK(finished.status == 1);
      CHECK(finished.err == "make regs: 31-some-step: ptxas says: " + said + "\n");
    }
  CHECK(regs("sm_90", kernels, "31-some-step", "ptxas info    : 0 bytes gmem\n").status == 0);
}

TEST_CASE("regs: the registers of the kernel with the longest loop, of each head dim, as CSV") {
  const std::string loops =
      kNamespace + "attention<__half, 64, 32>\n  a loop of 620 instructions: 9 HMMA\n" +
      kNamespace + "attention<__nv_bfloat16, 64, 32>\n  a loop of 640 instructions: 9 HMMA\n" +
      kNamespace + "attention<__half, 64, 64>\n  a loop of 101 instructions: 9 HMMA\n" +
      "  a loop of 780 instructions: 9 HMMA\n" + kNamespace +
      "handover\n  a loop of 1054 instructions: 9 HMMA\n";
  const fs::path csv = fs::temp_directory_path() / ("code." + std::to_string(getpid()));
  const Finished run = regs("sm_90 -v csv=" + csv.string(),
                            {{"attention<__half, 64, 32>(int)", 128, 200, 0, 0, 0, 0},
                             {"attention<__nv_bfloat16, 64, 32>(int)", 128, 202, 0, 0, 0, 0},
                             {"attention<__half, 64, 64>(int)", 128, 240, 0, 0, 0, 0},
                             {"rotate<64>(int)", 128, 40, 0, 0, 0, 0},
                             {"handover(int)", 128, 128, 0, 0, 0, 0}},
                            "21-ragged", loops);
  CHECK(run.status == 0);
  CHECK(read_text(csv) ==
        "step,head_dim,registers,instructions\n21-ragged,64,240,780\n21-ragged,128,128,1054\n");
  fs::remove(csv);
}

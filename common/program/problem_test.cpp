// SPDX-License-Identifier: MIT
// The program poses and checks every problem that a model may pose, before a step takes it: a plain
// kernel (any-problem/attention.cu) that takes them all passes, and bugs planted in it are found
// out.
//
// STEPS_DEVICE  cpu (default) or gpu
// STEPS_PREFIX  what each command is run under, "compute-sanitizer --tool memcheck": fewer runs
// ANY_PROBLEM   the program; default: one that is compiled here for the emulator
// TESTS_SEED    draws the shapes that nobody chose; default: another each time
#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/testing/copies.h"
#include "common/testing/problems.h"

namespace {

const std::string kSource = "common/program/any-problem/attention.cu";
const std::filesystem::path kFolder = "build/any-problem";

/// One problem for each thing that can depart from the plain one, and some where they meet.
const std::vector<std::string> kProblems = {
    "--seqlen 1",
    "--seqlen 33 --head-dim 80",
    "--seqlen 33 --head-dim 256 --batch 2 --heads 3",
    // fewer queries than keys and more, where the first queries see nothing
    "--seqlen 3 --seqlen-k 70",
    "--seqlen 70 --seqlen-k 3",
    "--seqlen 1 --seqlen-k 1 --causal",
    "--seqlen 65 --causal",
    "--seqlen 3 --seqlen-k 70 --causal",
    "--seqlen 70 --seqlen-k 3 --causal",
    // windows: of one key, of some, of more than there are
    "--seqlen 40 --window 1",
    "--seqlen 40 --seqlen-k 65 --window 7",
    "--seqlen 65 --seqlen-k 40 --window 7 --causal",
    "--seqlen 40 --window 2147483647",
    // heads in groups
    "--seqlen 33 --heads 6 --kv-heads 2",
    "--seqlen 33 --heads 6 --kv-heads 1 --batch 2 --causal",
    "--seqlen 33 --heads 3 --kv-heads 3",
    // types
    "--seqlen 65 --type bf16",
    "--seqlen 65 --type bf16 --causal --inputs rising",
    "--seqlen 65 --type bf16 --inputs ends",
    "--seqlen 65 --type bf16 --seqlen-k 33 --inputs one-hot",
    // layouts
    "--seqlen 33 --layout bnhd --batch 2 --heads 3",
    "--seqlen 33 --layout bnhd --batch 2 --heads 4 --kv-heads 2 --seqlen-k 50",
    "--seqlen 33 --layout interleaved --batch 2 --heads 3",
    "--seqlen 33 --layout interleaved --batch 2 --heads 4 --kv-heads 2",
    // pages: of one row, of some, of more than there are
    "--seqlen 5 --seqlen-k 50 --page-size 1",
    "--seqlen 5 --seqlen-k 100 --page-size 16 --batch 3 --causal",
    "--seqlen 5 --seqlen-k 100 --page-size 7 --batch 2 --heads 4 --kv-heads 2 --layout bnhd",
    "--seqlen 5 --seqlen-k 30 --page-size 64",
    // lengths: of queries and keys, none among them
    "--seqlen 50 --lengths 1,50,0,17",
    "--seqlen 50 --lengths 1,50,0,17 --causal --window 9",
    "--seqlen 50 --seqlen-k 60 --lengths 50:0,0:60,7:33 --causal",
    "--seqlen 1 --seqlen-k 100 --lengths 1:100,1:1,1:37 --page-size 16 --heads 6 --kv-heads 2",
    "--seqlen 33 --lengths 20,33 --layout interleaved --heads 4 --kv-heads 2 --causal --type bf16 "
    "--window 5 --head-dim 128",
    // sinks: one, some, more than there are keys before the window, more than there are
    "--seqlen 40 --window 5 --sinks 1",
    "--seqlen 40 --seqlen-k 65 --window 7 --sinks 4 --causal",
    "--seqlen 40 --window 30 --sinks 20 --lengths 40,3,1",
    "--seqlen 65 --seqlen-k 40 --window 1 --sinks 2147483647",
    // sequences that follow each other, none among them, or all
    "--layout packed --lengths 5,0,17,1 --heads 3",
    "--layout packed --lengths 1:5,0:7,17:0,3:30 --causal --heads 6 --kv-heads 2 --type bf16",
    "--layout packed --lengths 0,0",
    "--layout packed --lengths 1:5,3:60,2:2 --seqlen 3 --seqlen-k 64 --page-size 16 --causal",
    // keys that come beside the cache: one, some, all
    "--seqlen 1 --seqlen-k 40 --append 1 --batch 2 --heads 4 --kv-heads 2",
    "--seqlen 4 --seqlen-k 40 --append 4 --causal --layout bnhd",
    "--seqlen 4 --seqlen-k 4 --append 4 --causal --type bf16",
    "--lengths 1:40,1:16,1:17,1:3 --append 1 --page-size 16 --heads 4 --kv-heads 2",
    "--lengths 3:40,0:16,2:9 --append 9 --page-size 4 --causal --window 8 --sinks 2",
    "--lengths 3:40,1:16 --append 3 --page-size 8 --layout packed --causal",
    // rotation
    "--seqlen 40 --rope halves",
    "--seqlen 40 --rope neighbours --causal",
    "--seqlen 40 --rope halves --rope-dim 16 --head-dim 80",
    "--seqlen 3 --seqlen-k 40 --append 7 --rope neighbours --rope-dim 48 --head-dim 64",
    "--seqlen 40 --rope halves --head-dim 80 --inputs one-hot",
    "--seqlen 40 --rope neighbours --type bf16 --inputs equal-keys --heads 4 --kv-heads 2",
    "--seqlen 3 --seqlen-k 70 --rope halves --type bf16 --causal --window 20 --sinks 3",
    "--layout packed --lengths 1:5,0:7,17:40,3:3 --rope neighbours --causal",
    "--seqlen 5 --seqlen-k 40 --append 5 --rope halves --causal --batch 2",
    "--lengths 1:40,1:16,1:17 --append 1 --rope neighbours --page-size 16 --type bf16",
    // windows to both sides: none, of one key, wider than there are keys, and rows that see nothing
    "--seqlen 40 --window-size 0:0",
    "--seqlen 40 --window-size 5:3 --type bf16",
    "--seqlen 40 --seqlen-k 65 --window-size -1:4",
    "--seqlen 65 --seqlen-k 40 --window-size 7:-1",
    "--seqlen 65 --seqlen-k 20 --window-size 3:2 --causal --heads 3",
    "--seqlen 40 --window-size 2147483647:2147483647",
    "--lengths 40:65,3:1,0:9,20:0 --window-size 4:9",
    // another scale: small, large, none
    "--seqlen 40 --scale 0.05 --causal",
    "--seqlen 40 --scale 0",
    "--seqlen 40 --scale 1 --type bf16",
    "--seqlen 40 --scale 100 --inputs rising",
    "--seqlen 40 --scale 1000000",
    "--seqlen 40 --scale 3 --inputs one-hot --rope halves",
    // a soft cap that scores reach, that they do not reach, and that they are far beyond
    "--seqlen 40 --softcap 1 --heads 3",
    "--seqlen 40 --softcap 50 --type bf16 --causal",
    "--seqlen 40 --softcap 30 --inputs rising",
    "--seqlen 40 --softcap 0.001 --inputs ends",
    "--seqlen 40 --softcap 1000000",
    // a bias by distance: with fewer queries than keys and with more, where no row sees all
    "--seqlen 40 --alibi --heads 4",
    "--seqlen 3 --seqlen-k 70 --alibi --heads 8 --causal",
    "--seqlen 70 --seqlen-k 3 --alibi --heads 3 --type bf16",
    "--lengths 5:40,40:5,0:3,17:17 --alibi --heads 6 --kv-heads 2 --causal",
    // sinks, with rows that see nothing else
    "--seqlen 40 --sink-logits --heads 8",
    "--seqlen 70 --seqlen-k 3 --causal --sink-logits --heads 4",
    "--seqlen 40 --sink-logits --inputs rising --heads 3 --type bf16",
    "--seqlen 40 --sink-logits --inputs ends --heads 3",
    "--lengths 5:40,40:5,0:3,17:0 --sink-logits --heads 4 --window-size 7:0",
    "--seqlen 40 --softcap 5 --alibi --sink-logits --scale 0.5 --heads 4 --rope halves --causal",
};

struct Plant {
  std::string name, find, replace, options;
};

// Each shows in this problem: as a wrong answer, as an access that no thread may make, or as a
// race.
const std::vector<Plant> kPlants = {
    {"mask shows one key more", "p.causal || p.window ? position + 1 : N_k",
     "p.causal && position + 2 < N_k ? position + 2 : N_k", "--seqlen 40 --causal"},
    {"mask hides one key more", "p.causal || p.window ? position + 1 : N_k",
     "p.causal ? position : N_k", "--seqlen 40 --causal"},
    {"mask aligned at the first key", "i + N_k - N_q", "i", "--seqlen 20 --seqlen-k 40 --causal"},
    {"mask aligned without the lengths", "i + N_k - N_q", "i + p.seqlen_k - p.seqlen_q + 0 * N_q",
     "--seqlen 20 --lengths 20:10 --causal"},
    {"window one key wider", "end - p.window : 0", "end - p.window - 1 : 0",
     "--seqlen 40 --window 5"},
    {"window one key narrower", "end - p.window : 0", "end - p.window + 1 : 0",
     "--seqlen 40 --window 5"},
    {"window without a mask", "p.causal || p.window ? position", "p.causal ? position",
     "--seqlen 40 --window 5"},
    {"groups dealt out in turn", "head / (p.heads / p.kv_heads)", "head % p.kv_heads",
     "--seqlen 20 --heads 4 --kv-heads 2"},
    {"every group the first", "head / (p.heads / p.kv_heads)", "0 * head",
     "--seqlen 20 --heads 4 --kv-heads 2"},
    {"pages of the first sequence", "page_table(batch,", "page_table(0,",
     "--seqlen 5 --seqlen-k 40 --batch 2 --page-size 8"},
    {"pages in order", "page_table(batch, i / p.page_size)",
     "batch * pages + i / p.page_size + 0 * page_table(0, 0)",
     "--seqlen 5 --seqlen-k 40 --batch 2 --page-size 8"},
    {"the last row of a page from the next", "page_table(batch, i / p",
     "page_table(batch, (i + 1) / p", "--seqlen 5 --seqlen-k 38 --page-size 8"},
    {"strides of heads and rows swapped", "head * strides.head + i * strides.row",
     "i * strides.head + head * strides.row", "--seqlen 20 --layout bnhd --heads 3"},
    {"batch stride of another tensor", "p.Q_strides, batch", "p.O_strides, batch",
     "--seqlen 20 --layout interleaved --batch 2"},
    {"row stride of dense rows", "i * strides.row", "i * std::int64_t{p.heads} * p.head_dim",
     "--seqlen 20 --layout bnhd --heads 3"},
    {"keys beyond the length", "p.lengths_k ?", "false ?", "--seqlen 20 --lengths 20:10"},
    {"queries beyond the length", "p.lengths_q ?", "false ?", "--seqlen 20 --lengths 10:20"},
    {"lengths of the first sequence", "p.batch}(0, batch)", "p.batch}(0, 0)",
     "--seqlen 20 --lengths 20,10"},
    {"bf16 read as fp16", "if (type == Type::kFp16) return __half2float(bits);",
     "return __half2float(bits);", "--seqlen 20 --type bf16"},
    {"an empty row divided by zero", "l > 0 ? o[c] / l : 0", "o[c] / l",
     "--seqlen 20 --seqlen-k 10 --causal"},
    {"one sink more", "j >= p.sinks &&", "j > p.sinks &&", "--seqlen 40 --window 5 --sinks 2"},
    {"one sink less", "j >= p.sinks &&", "j >= p.sinks - 1 &&", "--seqlen 40 --window 5 --sinks 2"},
    {"no sinks", "j >= p.sinks &&", "", "--seqlen 40 --window 5 --sinks 1"},
    {"queries where the neighbour's begin", "p.batch + 1}(0, batch);\n  return",
     "p.batch + 1}(0, batch + 1);\n  return", "--layout packed --lengths 20,10"},
    {"keys where the neighbour's begin", "p.batch + 1}(0, batch);\n  if (p.page",
     "p.batch + 1}(0, batch + 1);\n  if (p.page", "--layout packed --lengths 20,10"},
    {"every sequence where the first begins", "i += Matrix<const int>{p.cu_seqlens_q",
     "i += 0 * Matrix<const int>{p.cu_seqlens_q", "--layout packed --lengths 20,10"},
    {"not appended", "if (rows) launch", "if (false) launch", "--seqlen 1 --seqlen-k 9 --append 1"},
    {"appended in the next row",
     "p.K_strides, batch, head, j), d);\n  const auto V = row_of(static_cast<half *>",
     "p.K_strides, batch, head, j - 1), d);\n  const auto V = row_of(static_cast<half *>",
     "--seqlen 1 --seqlen-k 9 --append 1"},
    {"appended at the first row", "- p.seqlen_new + i % p", "* 0 + i % p",
     "--seqlen 1 --seqlen-k 9 --append 1"},
    {"appended without the lengths", "keys_of(p, batch) - p.seqlen_new",
     "p.seqlen_k - p.seqlen_new", "--lengths 1:9,1:16 --append 1 --page-size 4"},
    {"appended to the page before", "page_table(batch, i / p.page_size)",
     "page_table(batch, p.K_new && i == p.seqlen_k - 1 ? i / p.page_size - 1 : i / p.page_size)",
     "--seqlen 1 --seqlen-k 9 --append 1 --page-size 4"},
    {"appended to one head", "i / p.seqlen_new % p.kv_heads", "0 * i",
     "--seqlen 1 --seqlen-k 9 --append 1 --heads 2"},
    {"the last new row left out", "if (i >= p.batch * p.kv_heads * p.seqlen_new) return;",
     "if (i >= p.batch * p.kv_heads * p.seqlen_new - 1) return;",
     "--seqlen 4 --seqlen-k 9 --append 4 --causal"},
    {"a value of the cache rounded anew", "V(0, c) = V_new(0, c)",
     "V(0, c) = nearest(value_of(V_new(0, c), p.type) * 1.001f, p.type)",
     "--seqlen 1 --seqlen-k 9 --append 1"},
    {"more written than the new rows", "V(0, c) = V_new(0, c);",
     "V(0, c) = V_new(0, c);\n  if (j > 0) row_of(static_cast<half *>(p.V), kv_offset(p, "
     "p.V_strides, batch, head, j - 1), d)(0, 0) = __float2half(0);",
     "--seqlen 1 --seqlen-k 9 --append 1 --window 1"},
    {"a gap of the cache written to", "V(0, c) = V_new(0, c);",
     "V(0, c) = V_new(0, c);\n  const int gap = d * p.kv_heads;\n  "
     "Matrix<half>{&static_cast<half *>(p.V)[gap], 1, d}(0, 0) = __float2half(0);",
     "--seqlen 1 --seqlen-k 9 --append 1 --layout bnhd"},
    {"neighbours for halves", "p.rope == Rope::kHalves", "false", "--seqlen 20 --rope halves"},
    {"halves for neighbours", "p.rope == Rope::kHalves", "true", "--seqlen 20 --rope neighbours"},
    {"the angle of the next pair", "(position, pair)", "(position, (pair + 1) % pairs)",
     "--seqlen 20 --rope halves"},
    {"turned the other way", "own * cos - other * sin : other * sin + own * cos",
     "own * cos + other * sin : own * cos - other * sin",
     "--lengths 5:20 --rope halves --append 3"},
    {"a query's position without the keys before", "rotated(p, Q, position, c)",
     "rotated(p, Q, i, c)", "--seqlen 5 --seqlen-k 20 --rope halves"},
    {"a key's position off by one", "rotated(p, K, j, c)", "rotated(p, K, j ? j - 1 : 0, c)",
     "--seqlen 20 --rope halves"},
    {"a new key's position off by one", "rotated(p, K_new, j, c)", "rotated(p, K_new, j - 1, c)",
     "--seqlen 1 --seqlen-k 20 --rope halves --append 1"},
    {"all columns rotated", "if (c >= p.rope_dim) return own;",
     "if (p.rope == Rope::kNone) return own;", "--seqlen 20 --rope neighbours --rope-dim 16"},
    {"a new key not rotated", "rotated(p, K_new, j, c)", "value_of(K_new(0, c), p.type)",
     "--seqlen 1 --seqlen-k 20 --rope halves --append 1"},
    {"keys of the cache rotated again", "p.K_new ? value_of", "false ? value_of",
     "--seqlen 1 --seqlen-k 20 --rope halves --append 1"},
    {"a rotated query rounded to half as many bits", "q[c] = rotated(p, Q, position, c)",
     "q[c] = value_of(nearest(rotated(p, Q, position, c), Type::kBf16), Type::kBf16)",
     "--seqlen 40 --rope halves"},
    {"a window wider to the left", "begin = position - p.window_left",
     "begin = position - p.window_left - 1", "--seqlen 40 --window-size 5:3"},
    {"a window narrower to the left", "begin = position - p.window_left",
     "begin = position - p.window_left + 1", "--seqlen 40 --window-size 5:3"},
    {"a window wider to the right", "position + 1 + p.window_right",
     "position + 2 + p.window_right", "--seqlen 40 --window-size 5:3"},
    {"a window narrower to the right", "position + 1 + p.window_right", "position + p.window_right",
     "--seqlen 40 --window-size 5:3"},
    {"a causal window to the right",
     "if (p.window_right >= 0 && p.window_right < end - 1 - position)", "if (p.window_right >= 0)",
     "--seqlen 40 --window-size 5:3 --causal"},
    {"the scale of the head dim", "s *= p.scale", "s *= 1 / sqrtf(d)", "--seqlen 40 --scale 0.2"},
    {"a soft cap before the scale",
     "s *= p.scale;\n    if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap)",
     "if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap);\n    s *= p.scale",
     "--seqlen 40 --softcap 3"},
    {"a soft cap not multiplied back", "s = p.softcap * tanhf", "s = tanhf",
     "--seqlen 40 --softcap 3"},
    {"a soft cap after the bias",
     "if (p.softcap > 0) s = p.softcap * tanhf(s / p.softcap);\n    s -= slope * (position < j ? j "
     "- position : position - j);",
     "s -= slope * (position < j ? j - position : position - j);\n    if (p.softcap > 0) s = "
     "p.softcap * tanhf(s / p.softcap);",
     "--seqlen 40 --softcap 1 --alibi"},
    {"the slope of another head", "slopes, 1, p.heads}(0, head)",
     "slopes, 1, p.heads}(0, (head + 1) % p.heads)", "--seqlen 40 --alibi --heads 2"},
    {"a distance without its sign taken off", "(position < j ? j - position : position - j)",
     "(position - j)", "--seqlen 40 --alibi"},
    {"a distance from the first key", "(position < j ? j - position : position - j)",
     "(i < j ? j - i : i - j)", "--seqlen 20 --seqlen-k 40 --alibi"},
    {"the sink of another head", "sink_logits, 1, p.heads}(0, head)",
     "sink_logits, 1, p.heads}(0, (head + 1) % p.heads)", "--seqlen 40 --sink-logits --heads 2"},
    {"a sink that is not counted", "    l = 1;\n", "", "--seqlen 40 --sink-logits"},
    {"a sink that is scaled", "(0, head);\n    l = 1;", "(0, head) * p.scale;\n    l = 1;",
     "--seqlen 40 --sink-logits"},
    {"log-sum-exp without the maximum", "= m + logf(l)", "= logf(l)", "--seqlen 40"},
    {"log-sum-exp in powers of two", "= m + logf(l)", "= m * 1.442695f + log2f(l)", "--seqlen 40"},
    {"log-sum-exp without the last key", "= m + logf(l)", "= m + logf(l * (1 - 1.f / end))",
     "--seqlen 200"},
    {"log-sum-exp in 16 bits", "= m + logf(l)", "= value_of(nearest(m + logf(l), p.type), p.type)",
     "--seqlen 40"},
    {"log-sum-exp of another head", "(batch * p.heads + head, i) = m",
     "(batch * p.heads + (head + 1) % p.heads, i) = m", "--seqlen 40 --heads 2"},
    {"log-sum-exp of the row before", "+ head, i) = m", "+ head, i > 0 ? i - 1 : i) = m",
     "--seqlen 40"},
    {"log-sum-exp of 0 where nothing is seen", "= m + logf(l)", "= l > 0 ? m + logf(l) : 0",
     "--seqlen 20 --seqlen-k 10 --causal"},
    {"log-sum-exp of rows that are not there", "  if (i >= N_q) return;",
     "  if (i >= N_q) {\n    if (i < p.seqlen_q) Matrix<float>{p.lse, p.batch * p.heads, "
     "p.seqlen_q}(batch * p.heads + head, i) = 0;\n    return;\n  }",
     "--seqlen 20 --lengths 10:20"},
    {"log-sum-exp before its tensor", "+ head, i) = m + logf(l);",
     "+ head, i) = m + logf(l);\n  if (i == 0 && head == 0) Matrix<float>{p.lse - 1, 1, 1}(0, 0) = "
     "0;",
     "--seqlen 20"},
    {"log-sum-exp not written", "  Matrix<float>{p.lse,", "  if (i < 39) Matrix<float>{p.lse,",
     "--seqlen 40"},
    {"an empty row not written", "for (int c = 0; c < d; c++) O(0, c)",
     "for (int c = 0; c < d && l > 0; c++) O(0, c)", "--seqlen 20 --seqlen-k 10 --causal"},
};

/// `text` with every `find` in it replaced; empty if there is none.
std::string replaced(std::string text, const std::string &find, const std::string &replace) {
  std::size_t at = text.find(find);
  if (at == std::string::npos) return "";
  for (; at != std::string::npos; at = text.find(find, at + replace.size()))
    text.replace(at, find.size(), replace);
  return text;
}

std::string show(const std::string &line, const Finished &finished) {
  return "\n" + line + "\n" + finished.out + finished.err + "exit status " +
         std::to_string(finished.status) + "\n";
}

}  // namespace

TEST_SUITE_BEGIN("steps");

TEST_CASE("every problem is posed and checked, by a plain kernel that takes them all") {
  const bool gpu = environment("STEPS_DEVICE", "cpu") == "gpu";
  std::string program = environment("ANY_PROBLEM", "");  // as the shell starts it
  if (gpu && program.empty()) return void(std::puts("SKIP: ANY_PROBLEM names no program"));
  if (program.empty()) {
    std::vector<Copy> copies = {{"any-problem", "any-problem", read_text(kSource)}};
    compile_copies(kFolder, copies);
    REQUIRE_MESSAGE(!copies[0].command.empty(), copies[0].complaint);
    program = copies[0].command;
  }
  const std::string prefix = environment("STEPS_PREFIX", "");
  std::vector<std::string> problems = kProblems;
  std::uint64_t state = tests_seed();
  if (prefix.empty())
    for (int i = 0; i < 40; i++) problems.push_back(draw_problem(describe(program), 80, 36, state));
  draw(problems, 60);
  if (gpu && contains(run_command(program + " --device gpu --seqlen 1").err, "no GPU"))
    return void(std::puts("SKIP: no GPU"));
  const auto check = [&](const std::string &problem) -> std::string {
    const std::string line = prefix + (prefix.empty() ? "" : " ") + program + " " + problem +
                             " --check-only --device " + (gpu ? "gpu" : "cpu");
    const Finished finished = run_command(line);
    return finished.status == 0 && contains(finished.out, ": passed\n") ? "" : show(line, finished);
  };
  std::vector<Job> jobs;
  for (const std::string &problem : problems) {
    if (gpu)
      CHECK(check(problem) == "");
    else
      jobs.push_back({problem, [&] { return check(problem); }, ""});
  }
  do_all(jobs);
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("planted");

TEST_CASE("a bug in the kernel of all problems is found out") {
  const std::string source = read_text(kSource);
  std::vector<Copy> copies;
  std::vector<Plant> plants(std::begin(kPlants), std::end(kPlants));
  draw(plants, 3);
  for (const Plant &plant : plants) {
    copies.push_back({"any-problem", plant.name, replaced(source, plant.find, plant.replace)});
    REQUIRE_MESSAGE(!copies.back().source.empty(), "the kernel does not hold '", plant.find, "'");
  }
  compile_copies(kFolder, copies);
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < copies.size(); i++)
    jobs.push_back({copies[i].name,
                    [&, i] {
                      if (copies[i].command.empty()) return copies[i].complaint;
                      const std::string line =
                          copies[i].command + " --device cpu --check-only " + plants[i].options;
                      const Finished finished = run_command(line);
                      const bool reported = contains(finished.out, ": WRONG\n") ||
                                            contains(finished.err, "out of bounds") ||
                                            contains(finished.err, "races in global memory") ||
                                            contains(finished.err, "outside of every allocation");
                      return finished.status == 1 && reported ? "" : show(line, finished);
                    },
                    ""});
  do_all(jobs);
}

TEST_SUITE_END();

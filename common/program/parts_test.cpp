// SPDX-License-Identifier: MIT
// Each row of a sequence is one GPU's, and what is written beside the rows is found.
#include "common/program/parts.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "common/kernel/processes.h"
#include "common/program/placement.h"

namespace {

/// GPUs that only remember.
class Memory : public Device {
 public:
  std::string name() const override { return "memory"; }
  bool is_gpu() const override { return false; }
  const Step &step() const override { return step_; }
  void use_gpus(int) override {}
  void *stream(int) override { return nullptr; }
  std::size_t free_bytes() const override { return 0; }
  void *allocate(std::size_t bytes) override {
    memory_.push_back(std::make_unique<std::byte[]>(bytes));
    std::memset(memory_.back().get(), 0xff, bytes);
    return memory_.back().get();
  }
  void upload(void *to, const void *from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void download(void *to, const void *from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void run(const std::function<void()> &) override {}
  void forward(const Problem &) override {}
  Times time(const std::function<void()> &, int, int, int) override { return {}; }

 private:
  Step step_{};
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

struct Case {
  Memory device;
  reference::Inputs inputs;
  Problem problem{};
  std::vector<GpuPart> parts;

  Case(int seqlen, int gpus, int batch = 2, int heads = 4, int kv_heads = 2,
       bool two_ends = false) {
    reference::Shape shape{.batch = batch,
                           .heads = heads,
                           .kv_heads = kv_heads,
                           .seqlen_q = seqlen,
                           .seqlen_k = seqlen,
                           .head_dim = 64};
    inputs = reference::make_inputs(reference::Family::kNormal, shape, Type::kFp16, 1);
    problem.batch = batch, problem.heads = heads, problem.kv_heads = kv_heads;
    problem.seqlen_q = problem.seqlen_k = seqlen, problem.head_dim = 64;
    problem.gpus = gpus;
    cut_into_parts(problem, two_ends);
    fill_parts(device, inputs, problem, parts);
  }
};

}  // namespace

TEST_CASE("parts: all rows are somebody's, in their order") {
  for (const int seqlen : {1, 2, 9, 16, 17})
    for (const int gpus : {1, 2, 3, 8}) {
      const Case c(seqlen, gpus);
      int rows = 0;
      for (int gpu = 0; gpu < gpus; gpu++) {
        rows += rows_of(c.problem, gpu);
        CHECK(rows == std::min(seqlen, (gpu + 1) * c.problem.part_rows));
      }
      CHECK(rows == seqlen);
    }
}

TEST_CASE(
    "parts: a GPU with two ends of the sequence has a chunk from each, and the rows follow each "
    "other") {
  for (const int seqlen : {1, 2, 9, 16, 17, 32, 33})
    for (const int gpus : {1, 2, 3, 8}) {
      Case c(seqlen, gpus, 2, 4, 2, true);
      const Problem &p = c.problem;
      std::vector<int> owner(static_cast<std::size_t>(seqlen), -1);
      for (int gpu = 0; gpu < gpus; gpu++) {
        CHECK((rows_of(p, gpu, 1) == 0 || rows_of(p, gpu, 0) == p.chunk_rows));
        for (const int which : {0, 1})
          for (int row = 0; row < rows_of(p, gpu, which); row++) {
            const auto at = static_cast<std::size_t>(first_row_of(p, gpu, which) + row);
            CHECK(owner.at(at) == -1);
            owner[at] = gpu;
            const auto *Q = static_cast<const std::uint16_t *>(c.parts[gpu].Q);
            CHECK(Q[(which * p.chunk_rows + row) * p.Q_strides.row] == c.inputs.Q[at * 64]);
          }
      }
      CHECK(std::count(owner.begin(), owner.end(), -1) == 0);
      CHECK(owner[0] == 0);
      for (int gpu = 0; gpu < gpus; gpu++)
        std::memcpy(c.parts[gpu].O, c.parts[gpu].Q,
                    sizeof(std::uint16_t) * static_cast<std::size_t>(2 * p.O_strides.batch));
      std::size_t strays;
      CHECK(gather_parts(c.device, p, {&GpuPart::O, 4}, strays) == c.inputs.Q);
      CHECK(strays == 0);
    }
}

TEST_CASE("parts: a part has its rows of K, and NaN after the last one") {
  const Case c(10, 4);  // 3, 3, 3 and 1
  const int kv_heads = 2, d = 64, b = 1, head = 1;
  const auto *K = static_cast<const std::uint16_t *>(c.parts[3].K);
  const auto at = [&](int row) {
    return b * c.problem.K_strides.batch + head * c.problem.K_strides.head +
           row * c.problem.K_strides.row;
  };
  CHECK(K[at(0) + 5] == c.inputs.K[((b * kv_heads + head) * 10 + 9) * d + 5]);
  CHECK(K[at(1) + 5] == kPoison);
}

TEST_CASE("parts: O comes together, and a stray element is counted") {
  for (const int gpus : {1, 2, 3, 8}) {
    Case c(10, gpus);
    std::size_t strays;
    CHECK(gather_parts(c.device, c.problem, {&GpuPart::O, 4}, strays)[0] ==
          kPoison);  // nothing was written
    CHECK(strays == 0);
    for (int gpu = 0; gpu < gpus; gpu++)  // O is Q
      std::memcpy(c.parts[gpu].O, c.parts[gpu].Q,
                  sizeof(std::uint16_t) * static_cast<std::size_t>(2 * c.problem.O_strides.batch));
    CHECK(gather_parts(c.device, c.problem, {&GpuPart::O, 4}, strays) == c.inputs.Q);
    CHECK(strays == 0);
    if (10 % gpus == 0) continue;
    const int last = gpus - 1;  // whose rows are fewer
    static_cast<std::uint16_t *>(
        c.parts[last].O)[rows_of(c.problem, last) * c.problem.O_strides.row] = 1;
    (void)gather_parts(c.device, c.problem, {&GpuPart::O, 4}, strays);
    CHECK(strays == 1);
  }
}

TEST_CASE("parts: what a backward pass starts from, and room for its results") {
  for (const int gpus : {1, 3}) {
    Case c(10, gpus, 2, 4, 2, true);
    reference::add_dO(c.inputs, reference::Family::kNormal, 1);
    const reference::Forward forward = reference::forward_pass(c.inputs);
    const Problem &p = c.problem;
    fill_backward_parts(c.device, c.inputs, forward, p, c.parts);
    std::size_t strays;
    CHECK(gather_parts(c.device, p, {&GpuPart::O, 4}, strays) == forward.O);
    CHECK(gather_parts(c.device, p, {&GpuPart::dQ, 4}, strays)[0] == kPoison);
    CHECK(gather_parts(c.device, p, {&GpuPart::dK, 2}, strays)[0] == kPoison);
    for (int gpu = 0; gpu < gpus; gpu++) {
      const std::size_t bytes = sizeof(std::uint16_t) * elements_of_part(p, 4);
      std::memcpy(c.parts[gpu].dQ, c.parts[gpu].dO, bytes);
      std::memcpy(c.parts[gpu].dV, c.parts[gpu].V, bytes / 2);
      for (int head = 0; head < 8; head++)  // of both sequences
        for (const int which : {0, 1})
          for (int row = 0; row < rows_of(p, gpu, which); row++)
            CHECK(c.parts[gpu].lse[head * p.part_rows + which * p.chunk_rows + row] ==
                  forward.lse[head * 10 + first_row_of(p, gpu, which) + row]);
    }
    CHECK(gather_parts(c.device, p, {&GpuPart::dQ, 4}, strays) == c.inputs.dO);
    CHECK(gather_parts(c.device, p, {&GpuPart::dV, 2}, strays) == c.inputs.V);
    CHECK(strays == 0);
  }
}

TEST_CASE("parts: of several processes each has one GPU's rows, and checks these") {
  for (const bool two_ends : {false, true})
    for (const int gpus : {1, 2, 3}) {
      std::vector<reference::Place> places;
      for (int row = 0; row < 17; row++) places.push_back({1, 3, row});
      std::vector<int> checked(places.size());
      for (int rank = 0; rank < gpus; rank++) {
        processes.rank = rank;
        Case c(17, gpus, 2, 4, 2, two_ends);
        for (int gpu = 0; gpu < gpus; gpu++)
          CHECK((c.parts[static_cast<std::size_t>(gpu)].Q != nullptr) == (gpu == rank));
        GpuPart &own = c.parts[static_cast<std::size_t>(rank)];
        std::memcpy(
            own.O, own.Q,
            sizeof(std::uint16_t) * static_cast<std::size_t>(2 * c.problem.O_strides.batch));
        std::size_t strays;
        const reference::Elements O = gather_parts(c.device, c.problem, {&GpuPart::O, 4}, strays);
        CHECK(strays == 0);
        for (const reference::Place &place : own_places(c.problem, places)) {
          checked[static_cast<std::size_t>(place.row)]++;
          const auto at = static_cast<std::size_t>((1 * 4 + 3) * 17 + place.row) * 64;
          CHECK(O[at] == c.inputs.Q[at]);
        }
      }
      processes.rank = -1;
      CHECK(std::count(checked.begin(), checked.end(), 1) == 17);
    }
}

// SPDX-License-Identifier: MIT
// The file of --trace: JSON in the trace event format, whose slices do not overlap on a track, and whose arrows have
// both ends.
#include <doctest/doctest.h>

#include <cctype>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/testing/process.h"

namespace {

/// A value of JSON. What is no object and no array is kept as it is written, a string without its quotes.
struct Json {
  std::map<std::string, Json> members;
  std::vector<Json> items;
  std::string text;

  const Json &operator[](const std::string &name) const {
    const auto found = members.find(name);
    if (found == members.end()) throw std::runtime_error("no member " + name);
    return found->second;
  }
  std::uint64_t number() const { return std::stoull(text); }
};

/// Reads the JSON that a trace is made of: without escapes, true, false and null. Throws std::runtime_error.
class Parser {
 public:
  explicit Parser(const std::string &text) : text_(text) {}

  Json read_all() {
    Json value = read();
    if (next() != '\0') throw std::runtime_error("text after the value");
    return value;
  }

 private:
  char next() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) at_++;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  void expect(char wanted) {
    if (next() != wanted) throw std::runtime_error(std::string("no ") + wanted);
    at_++;
  }
  std::string read_string() {
    expect('"');
    const std::size_t end = text_.find_first_of("\"\\\n", at_);
    if (end == std::string::npos || text_[end] != '"') throw std::runtime_error("no end of text");
    const std::size_t begin = std::exchange(at_, end + 1);
    return text_.substr(begin, end - begin);
  }
  Json read() {
    Json value;
    if (const char first = next(); first == '{' || first == '[') {
      const char last = first == '{' ? '}' : ']';
      at_++;
      if (next() != last) do {
          if (first == '[') {
            value.items.push_back(read());
          } else {
            const std::string name = read_string();
            expect(':');
            value.members[name] = read();
          }
        } while (next() == ',' && ++at_);
      expect(last);
    } else if (first == '"') {
      value.text = read_string();
    } else {
      while (std::isdigit(static_cast<unsigned char>(next()))) value.text += text_[at_++];
      if (value.text.empty()) throw std::runtime_error("no value");
    }
    return value;
  }

  const std::string &text_;
  std::size_t at_ = 0;
};

/// What a trace has: slices by name, and the arrows between slices of these names.
struct Content {
  std::map<std::string, int> slices;
  std::set<std::string> arrows;  // "tma_load -> mbarrier_wait"
  std::set<std::string> tracks;
};

/// Reads a trace. Throws std::runtime_error if it is not as the format or the emulator promises.
Content read_trace(const std::string &text) {
  const Json all = Parser(text).read_all();
  using Track = std::pair<std::uint64_t, std::uint64_t>;
  struct Slice {
    std::uint64_t end;
    std::string name;
  };
  struct Arrow {
    std::optional<std::uint64_t> begin, end;
    std::string from, to;
  };
  Content content;
  std::map<Track, std::map<std::uint64_t, Slice>> slices;  // by their begin
  std::map<std::uint64_t, Arrow> arrows;
  const auto track = [](const Json &event) {
    return Track(event["pid"].number(), event["tid"].number());
  };
  for (const Json &event : all["traceEvents"].items) {
    if (event["name"].text == "thread_name") content.tracks.insert(event["args"]["name"].text);
    if (event["ph"].text != "X") continue;
    const std::uint64_t begin = event["ts"].number(), end = begin + event["dur"].number();
    if (end == begin) throw std::runtime_error("an empty slice");
    if (event["args"]["line"].text.find(':') == std::string::npos)
      throw std::runtime_error("a slice without its line");
    if (!slices[track(event)].emplace(begin, Slice{end, event["name"].text}).second)
      throw std::runtime_error("slices overlap");
    content.slices[event["name"].text]++;
  }
  for (const auto &[of, on_track] : slices) {
    std::uint64_t free = 0;
    for (const auto &[begin, slice] : on_track) {
      if (begin < free) throw std::runtime_error("slices overlap");
      free = slice.end;
    }
  }
  for (const Json &event : all["traceEvents"].items) {
    const bool begins = event["ph"].text == "s";
    if (!begins && event["ph"].text != "f") continue;
    const std::uint64_t time = event["ts"].number();
    const auto &on_track = slices[track(event)];
    auto slice = on_track.upper_bound(time);
    if (slice == on_track.begin() || (--slice)->second.end <= time)
      throw std::runtime_error("an arrow's end lies in no slice");
    Arrow &arrow = arrows[event["id"].number()];
    auto &end = begins ? arrow.begin : arrow.end;
    if (end) throw std::runtime_error("an arrow has two ends of a kind");
    end = time;
    (begins ? arrow.from : arrow.to) = slice->second.name;
  }
  for (const auto &[id, arrow] : arrows) {
    if (!arrow.begin || !arrow.end) throw std::runtime_error("an arrow has one end");
    if (*arrow.begin >= *arrow.end) throw std::runtime_error("an arrow goes back");
    content.arrows.insert(arrow.from + " -> " + arrow.to);
  }
  return content;
}

/// The trace of a run.
std::string traced(const std::string &command) {
  const std::string folder = "build/traces/", file = folder + command.substr(0, 7) + ".json";
  std::filesystem::create_directories(folder);
  const Finished finished = run_command("./" + command + " --device cpu --heads 1 --trace " + file);
  CHECK_MESSAGE(finished.status == 0, command, ": ", finished.err);
  return read_text(file);
}

std::string error_of(const std::string &text) {
  try {
    read_trace(text);
  } catch (const std::exception &error) {
    return error.what();
  }
  return "";
}

std::string replaced(std::string text, const std::string &from, const std::string &to) {
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("trace: a step of each kind, with what it does and what ends its waits") {
  struct Expected {
    std::string command;
    std::vector<std::string> slices, arrows, tracks;
  };
  const std::vector<Expected> steps = {
      {"step-00 --seqlen 128", {"global load", "global store"}, {}, {"warp 0"}},
      {"step-08 --seqlen 128",
       {"cp.async", "cp.async wait", "ldmatrix", "mma", "__syncthreads"},
       {"mma -> mma", "__syncthreads -> __syncthreads"},
       {"warp 3", "tensor cores"}},
      {"step-33 --seqlen 512",
       {"tma_load", "mbarrier_wait", "mbarrier_arrive", "wgmma", "wgmma_wait"},
       {"tma_load -> tma_load", "tma_load -> mbarrier_wait", "mbarrier_arrive -> mbarrier_wait",
        "wgmma -> wgmma_wait"},
       {"warp 0", "warp 8", "TMA", "tensor cores"}},
      {"step-36 --seqlen 512",
       {"named_barrier_sync", "tma_store", "tma_store_wait_read", "stmatrix"},
       {"named_barrier_arrive -> named_barrier_sync", "tma_store -> tma_store_wait_read"},
       {"TMA", "tensor cores"}},
      {"step-70 --gpus 3 --seqlen 192", {"ncclAllGather", "kernel"}, {}, {"stream 0"}},
      {"step-71 --gpus 4 --seqlen 512",
       {"kernel", "cudaStreamWaitEvent"},
       {"ncclSend -> ncclRecv", "kernel -> cudaStreamWaitEvent"},
       {"stream 0", "stream 1", "stream 1, sends"}},
      {"step-71 --gpus 2 --seqlen 128 --link copies", {"cudaMemcpyPeerAsync"}, {}, {"stream 1"}},
      // One of several GPUs is one GPU, of which the trace has the first block.
      {"step-71 --gpus 1 --seqlen 128", {"wgmma"}, {}, {"TMA"}}};
  for (const Expected &expected : steps) {
    CAPTURE(expected.command);
    const Content content = read_trace(traced(expected.command));
    for (const std::string &name : expected.slices) CHECK_MESSAGE(content.slices.count(name), name);
    for (const std::string &name : expected.arrows) CHECK_MESSAGE(content.arrows.count(name), name);
    for (const std::string &name : expected.tracks) CHECK_MESSAGE(content.tracks.count(name), name);
  }
}

TEST_CASE("trace: of the same seed it is the same, and a file that is there is replaced") {
  const std::string first = traced("step-33 --seqlen 256");
  CHECK(traced("step-33 --seqlen 256") == first);
  CHECK(traced("step-33 --seqlen 256 --seed 2") != first);
}

TEST_CASE("trace: bytes are those of the transfers") {
  const Json all = Parser(traced("step-33 --seqlen 256")).read_all();
  std::uint64_t bytes = 0;
  for (const Json &event : all["traceEvents"].items)
    if (event["ph"].text == "X" && event["name"].text == "tma_load")
      bytes += event["args"]["bytes"].number();
  CHECK(bytes == (128 + 2 * 256) * 64 * 2);  // a tile of Q, all of K and V, in fp16
}

TEST_CASE("trace: the messages of several GPUs have the bytes of the links") {
  const Json all = Parser(traced("step-71 --gpus 3 --seqlen 384")).read_all();
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> bytes;  // of a link
  for (const Json &event : all["traceEvents"].items)
    if (event["ph"].text == "X" && event["name"].text == "ncclSend")
      bytes[{event["pid"].number(), event["args"]["device"].number()}] +=
          event["args"]["bytes"].number();
  CHECK(bytes.size() == 3);
  for (const auto &[link, carried] : bytes) {
    CHECK(link.second == (link.first + 1) % 3);
    CHECK(carried == 2 * 2 * 128 * 64 * 2);  // K and V in two hops
  }
}

TEST_CASE("trace: what breaks it is found") {
  const std::string good = traced("step-33 --seqlen 256");
  REQUIRE(error_of(good) == "");
  CHECK(error_of(good.substr(0, good.size() / 2)) != "");
  CHECK(error_of(replaced(good, R"({"ph":"s",)", R"({"ph":"t",)")) == "an arrow has one end");
  CHECK(error_of(replaced(good, R"({"ph":"f",)", R"({"ph":"s",)")) ==
        "an arrow has two ends of a kind");
  CHECK(error_of(replaced(good, R"("dur":)", R"("dur":1000000)")) == "slices overlap");
}

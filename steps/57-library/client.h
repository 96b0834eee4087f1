// SPDX-License-Identifier: MIT
// What the programs that call the library share: they find it by its file, have vectors on the device, and read their
// options.
#pragma once

#include <dlfcn.h>
#include <getopt.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "reference/type.h"
#include "steps/57-library/attention.h"

namespace {

enum ExitStatus { kPassed = 0, kWrongAnswer = 1, kBadArguments = 2, kNoDevice = 3 };

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The library's functions, found by their names.
class Library {
 public:
  explicit Library(const std::string &file) : handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw UsageError("--library " + file + ": " + dlerror());
  }
  Library(const Library &) = delete;
  ~Library() { dlclose(handle_); }

  /// Calls a function of the header; throws what the library says if it fails.
  template <class... Parameters, class... Arguments>
  void operator()(const char *name, int (*)(Parameters...), Arguments... arguments) const {
    const auto function = reinterpret_cast<int (*)(Parameters...)>(find(name));
    const int status = function(arguments...);
    if (status == ATTENTION_OK) return;
    const auto message = reinterpret_cast<decltype(&attention_message)>(find("attention_message"));
    const std::string what = std::string(name) + ": " + message();
    if (status == ATTENTION_DEVICE || status == ATTENTION_MEMORY) throw DeviceError(what);
    throw std::runtime_error(what);
  }

 private:
  void *find(const char *name) const {
    void *function = dlsym(handle_, name);
    if (!function) throw std::runtime_error(std::string("the library has no ") + name);
    return function;
  }

  void *handle_;
};
#define CALL(library, function, ...) \
  library(#function, static_cast<decltype(&function)>(nullptr), __VA_ARGS__)

/// A vector in the memory of the device.
template <class T>
class DeviceVector {
 public:
  DeviceVector(const Library &library, std::size_t size) : library_(library), size_(size) {
    CALL(library_, attention_allocate, &data_, size * sizeof(T));
  }
  DeviceVector(const Library &library, const std::vector<T> &values)
      : DeviceVector(library, values.size()) {
    upload(values);
  }
  DeviceVector(const DeviceVector &) = delete;
  ~DeviceVector() { CALL(library_, attention_release, data_); }

  void upload(const std::vector<T> &values) {
    CALL(library_, attention_upload, data_, values.data(), values.size() * sizeof(T));
  }
  std::vector<T> download() const {
    std::vector<T> values(size_);
    CALL(library_, attention_download, values.data(), data_, size_ * sizeof(T));
    return values;
  }
  T *data() const { return static_cast<T *>(data_); }

 private:
  const Library &library_;
  std::size_t size_;
  void *data_ = nullptr;
};

int whole_number(const std::string &option, const std::string &text, int least) {
  char *end;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || value < least || value > 1000000)
    throw UsageError(option + " " + text + ": a whole number from " + std::to_string(least) +
                     " to 1000000 is allowed");
  return static_cast<int>(value);
}

Type type_of(const std::string &option, const std::string &text) {
  if (text != "fp16" && text != "bf16")
    throw UsageError(option + " " + text + ": allowed are fp16, bf16");
  return text == "bf16" ? Type::kBf16 : Type::kFp16;
}

/// Gives `take` the name and the value of each option. Returns whether only the help is wanted, and throws UsageError
/// for what is no option.
bool read_options(int argc, char **argv, std::vector<std::string> names,
                  const std::function<void(const std::string &, const std::string &)> &take) {
  names.push_back("help");
  std::vector<option> table;
  for (const std::string &name : names)
    table.push_back({name.c_str(), name == "help" ? no_argument : required_argument, nullptr,
                     1000 + static_cast<int>(table.size())});
  table.push_back({});
  opterr = 0;
  bool help = false;
  for (;;) {
    const std::string word = optind < argc ? argv[optind] : "";
    const int key = getopt_long(argc, argv, "+:", table.data(), nullptr);
    if (key == -1) break;
    if (key == ':') throw UsageError(word + ": a value is missing; --help lists the options");
    if (key < 1000) throw UsageError(word + ": no such option; --help lists the options");
    if (names[key - 1000] == "help") help = true;
    take(names[key - 1000], optarg ? optarg : "");
  }
  if (optind < argc)
    throw UsageError(std::string(argv[optind]) + ": not an option; --help lists the options");
  return help;
}

/// Reads the options, runs the program, and turns what is thrown into one line and an exit status.
int run_program(const char *name, const char *help, int argc, char **argv,
                const std::vector<std::string> &options,
                const std::function<void(const std::string &, const std::string &)> &take,
                const std::function<int()> &run) {
  const auto complain = [=](const char *message, ExitStatus status) {
    std::fprintf(stderr, "%s: %s\n", name, message);
    return status;
  };
  try {
    if (!read_options(argc, argv, options, take)) return run();
    std::fputs(help, stdout);
    return kPassed;
  } catch (const UsageError &error) {
    return complain(error.what(), kBadArguments);
  } catch (const DeviceError &error) {
    return complain(error.what(), kNoDevice);
  } catch (const std::exception &error) {
    return complain(error.what(), kWrongAnswer);
  }
}

}  // namespace

// SPDX-License-Identifier: MIT
// Several devices: what streams, events and messages order, and what they do not.
#include "common/emulator/devices.h"

#include <array>

#include "common/emulator/testing.h"
#include "common/kernel/gpus.h"

namespace {

constexpr int rows = 4, d = 64;
constexpr std::size_t bytes = rows * d * sizeof(half), elements = rows * d;

struct Nothing {};

/// Devices with two streams each, a communicator, and two arrays of `rows` x d numbers: a and b, on a stream's
/// device. The first element of a is 100 and the device's number.
struct Gpus {
  const Setup setup;
  std::vector<cudaStream_t> stream, side;
  std::vector<cudaEvent_t> event;
  std::vector<ncclComm_t> comm;
  std::vector<half *> a, b;
  std::vector<Kernel> kernels = std::vector<Kernel>(8);  // they live until the launch has run

  explicit Gpus(int count, std::uint64_t seed = 1) {
    emulator::settings.seed = seed;
    emulator::begin_devices(count);
    for (int device = 0; device < count; device++) {
      cudaSetDevice(device);
      cudaStreamCreateWithFlags(&stream.emplace_back(), cudaStreamNonBlocking);
      cudaStreamCreateWithFlags(&side.emplace_back(), cudaStreamNonBlocking);
      cudaEventCreateWithFlags(&event.emplace_back(), cudaEventDisableTiming);
      for (std::vector<half *> *array : {&a, &b}) {
        void *memory;
        cudaMalloc(&memory, count * bytes);
        array->push_back(static_cast<half *>(memory));
        for (std::size_t i = 0; i < count * elements; i++) array->back()[i] = __float2half(0);
      }
      a.back()[0] = __float2half(static_cast<float>(100 + device));
    }
    comm.resize(static_cast<std::size_t>(count));
    ncclCommInitAll(comm.data(), count, nullptr);
  }
  ~Gpus() {
    emulator::begin_devices(1);
    for (half *memory : a) emulator::release(memory);
    for (half *memory : b) emulator::release(memory);
  }

  /// Launches one thread on a stream, which keeps the kernel in this place.
  void run(cudaStream_t on, int device, std::size_t place, const Kernel &kernel) {
    cudaSetDevice(device);
    kernels[place] = kernel;
    launch_on<Nothing>(
        on, +[](const Kernel *body) { (*body)(); }, dim3(1), dim3(1), &kernels[place]);
  }
  /// A kernel that stores a number to an array, or reads it.
  Kernel store(half *array, float value) {
    return [=] { Matrix<half>{array, rows, d}(0, 0) = __float2half(value); };
  }
  Kernel load(half *array) {
    return [=] { read(Matrix<half>{array, rows, d}(0, 0)); };
  }
  /// Each device sends `array` to the next and receives into b.
  void pass_on(const std::vector<half *> &array) {
    const int count = static_cast<int>(comm.size());
    ncclGroupStart();
    for (int i = 0; i < count; i++) {
      ncclSend(array[i], elements, ncclFloat16, (i + 1) % count, comm[i], stream[i]);
      ncclRecv(b[i], elements, ncclFloat16, (i + count - 1) % count, comm[i], stream[i]);
    }
    ncclGroupEnd();
  }
  float first(const half *array) const { return __half2float(array[0]); }
};

/// The error that some work on two devices ends with, the same under all seeds, with its tag.
std::string error_of_gpus(const std::function<void(Gpus &)> &work, int count = 2) {
  std::string one;
  for (int seed = 1; seed <= kSeeds; seed++) {
    Gpus gpus(count, static_cast<std::uint64_t>(seed));
    std::string error = error_of_work([&] {
      work(gpus);
      emulator::synchronise_devices();
    });
    error = tag + error;
    if (seed == 1) one = error;
    CHECK(error == one);
  }
  return one;
}

}  // namespace

TEST_CASE("devices: messages go around, and the bytes of each link are counted") {
  for (const int count : {1, 2, 3, 8}) {
    Gpus gpus(count);
    gpus.pass_on(gpus.a);
    CHECK(gpus.first(gpus.b[0]) == 0);  // nothing runs until the host waits
    emulator::synchronise_devices();
    for (int i = 0; i < count; i++) CHECK(gpus.first(gpus.b[i]) == 100 + (i + count - 1) % count);
    const emulator::LinkBytes links = emulator::take_link_bytes();
    CHECK(links.size() == (count > 1 ? count : 0));
    for (const auto &[link, carried] : links) {
      CHECK(link.second == (link.first + 1) % count);
      CHECK(carried == bytes);
    }
  }
}

TEST_CASE("devices: it says how many launches are queued and have not begun") {
  Gpus gpus(2);
  std::vector<std::uint64_t> left;
  for (int i = 0; i < 3; i++)
    gpus.run(gpus.stream[i % 2], i % 2, i, [&] { left.push_back(emulator::queued_launches()); });
  CHECK(emulator::queued_launches() == 3);
  emulator::synchronise_devices();
  CHECK(left == std::vector<std::uint64_t>{2, 1, 0});
}

TEST_CASE("devices: all gather") {
  for (const int count : {1, 2, 3, 8}) {
    Gpus gpus(count);
    ncclGroupStart();
    for (int i = 0; i < count; i++)
      ncclAllGather(gpus.a[i], gpus.b[i], elements, ncclFloat16, gpus.comm[i], gpus.stream[i]);
    ncclGroupEnd();
    emulator::synchronise_devices();
    for (int i = 0; i < count; i++)
      for (int from = 0; from < count; from++)
        CHECK(gpus.first(gpus.b[i] + from * elements) == 100 + from);
    for (const auto &[link, carried] : emulator::take_link_bytes())
      CHECK(carried == (count - 1) * bytes);
  }
}

TEST_CASE("devices: all gather in place has each part at the rank's place") {
  const auto gather = [](Gpus &gpus, std::size_t place_of_1) {
    ncclGroupStart();
    for (const std::size_t i : {0, 1}) {
      const std::size_t place = i == 0 ? 0 : place_of_1;
      ncclAllGather(gpus.a[i] + place, gpus.a[i], elements, ncclFloat16, gpus.comm[i],
                    gpus.stream[i]);
    }
    ncclGroupEnd();
  };
  CHECK(error_of_gpus([&](Gpus &gpus) { gather(gpus, elements); }) == "");
  for (const std::size_t place : {std::size_t{0}, elements / 2})
    CHECK(error_of_gpus([&](Gpus &gpus) {
            gather(gpus, place);
          }).find("not at its own place there") != std::string::npos);
}

TEST_CASE("devices: what a stream does is in order, also across a message") {
  for (std::uint64_t seed = 1; seed <= kSeeds; seed++) {
    Gpus gpus(2, seed);
    gpus.run(gpus.stream[0], 0, 0, gpus.store(gpus.a[0], 7));
    gpus.pass_on(gpus.a);
    half *const b = gpus.b[1];
    gpus.run(gpus.stream[1], 1, 1, [=] {
      const float value = __half2float(Matrix<half>{b, rows, d}(0, 0));
      Matrix<half>{b, rows, d}(0, 1) = __float2half(value + 1);
    });
    emulator::synchronise_devices();
    CHECK(__half2float(b[1]) == 8);
  }
}

TEST_CASE("devices: two streams of a device race, unless an event is between them") {
  const auto two = [&](Gpus &gpus, bool ordered) {
    half *const a = gpus.a[1];
    gpus.run(gpus.stream[1], 1, 0, [=] { Matrix<half>{a, rows, d}(0, 0) = half{}; });
    if (ordered) {
      cudaEventRecord(gpus.event[1], gpus.stream[1]);
      cudaStreamWaitEvent(gpus.side[1], gpus.event[1]);
    }
    gpus.run(gpus.side[1], 1, 1, [=] { read(Matrix<half>{a, rows, d}(0, 0)); });
    emulator::synchronise_devices();
  };
  CHECK(error_of_gpus([&](Gpus &gpus) { two(gpus, true); }) == "");
  const std::string error = error_of_gpus([&](Gpus &gpus) { two(gpus, false); });
  CHECK(error.starts_with("[race] "));
  CHECK(error.find("device 1: store races with the load at") != std::string::npos);
  // An event that is recorded after the wait orders nothing.
  CHECK(error_of_gpus([&](Gpus &gpus) {
          cudaStreamWaitEvent(gpus.side[1], gpus.event[1]);
          cudaEventRecord(gpus.event[1], gpus.stream[1]);
          two(gpus, false);
        }) == error);
  // Nor does one of another device's stream: it comes before both.
  CHECK(error_of_gpus([&](Gpus &gpus) {
          cudaEventRecord(gpus.event[0], gpus.stream[0]);
          cudaStreamWaitEvent(gpus.stream[1], gpus.event[0]);
          cudaStreamWaitEvent(gpus.side[1], gpus.event[0]);
          two(gpus, false);
        }) == error);
}

TEST_CASE("devices: the host's wait orders what it queues later") {
  CHECK(error_of_gpus([](Gpus &gpus) {
          gpus.run(gpus.stream[0], 0, 0, gpus.store(gpus.a[0], 1));
          cudaStreamSynchronize(gpus.stream[0]);
          gpus.run(gpus.side[0], 0, 1, gpus.load(gpus.a[0]));
        }) == "");
  CHECK(error_of_gpus([](Gpus &gpus) {
          gpus.run(gpus.stream[0], 0, 0, gpus.store(gpus.a[0], 1));
          cudaSetDevice(1);
          cudaDeviceSynchronize();  // of the other device
          gpus.run(gpus.side[0], 0, 1, gpus.load(gpus.a[0]));
        }).starts_with("[race] "));
}

TEST_CASE("devices: atomics of two launches race, unless an event is between them") {
  const auto draw = [](Gpus &gpus) {
    return [counter = reinterpret_cast<unsigned *>(gpus.a[0])] {
      atomic_dec(Matrix<unsigned>{counter, 1, 1}(0, 0), 7);
    };
  };
  const std::string error = error_of_gpus([&](Gpus &gpus) {
    gpus.run(gpus.stream[0], 0, 0, draw(gpus));
    gpus.run(gpus.side[0], 0, 1, draw(gpus));
  });
  CHECK(error.starts_with("[race] "));
  CHECK(error.find("device 0: atomic races with the atomic at") != std::string::npos);
  CHECK(error_of_gpus([&](Gpus &gpus) {
          gpus.run(gpus.stream[0], 0, 0, draw(gpus));
          gpus.run(gpus.side[0], 0, 1, gpus.load(gpus.a[0]));
        }).starts_with("[race] "));
  CHECK(error_of_gpus([&](Gpus &gpus) {
          gpus.run(gpus.stream[0], 0, 0, draw(gpus));
          cudaEventRecord(gpus.event[0], gpus.stream[0]);
          cudaStreamWaitEvent(gpus.side[0], gpus.event[0]);
          gpus.run(gpus.side[0], 0, 1, draw(gpus));
        }) == "");
}

TEST_CASE(
    "devices: what the owner of a stream writes comes before and after what else it queues there") {
  const auto write = [](Gpus &gpus) { emulator::rewrite(gpus.stream[0], gpus.a[0], bytes); };
  CHECK(error_of_gpus([&](Gpus &gpus) {
          write(gpus);
          gpus.run(gpus.stream[0], 0, 0, gpus.load(gpus.a[0]));
          write(gpus);
        }) == "");
  const std::string error = error_of_gpus([&](Gpus &gpus) {
    write(gpus);
    gpus.run(gpus.side[0], 0, 0, gpus.load(gpus.a[0]));
  });
  CHECK(error.starts_with("[in-flight] "));
  CHECK(error.find("the caller's write at") != std::string::npos);
  CHECK(error_of_gpus([&](Gpus &gpus) {
          gpus.run(gpus.side[0], 0, 0, gpus.load(gpus.a[0]));
          write(gpus);
        }) == error);
}

TEST_CASE("devices: a buffer is nobody's while a message is under way") {
  // Read beside its receive.
  std::string error = error_of_gpus([](Gpus &gpus) {
    gpus.pass_on(gpus.a);
    gpus.run(gpus.side[0], 0, 0, gpus.load(gpus.b[0]));
  });
  CHECK(error.starts_with("[in-flight] "));
  CHECK(error.find("device 0: load of bytes that the ncclRecv at") != std::string::npos);
  CHECK(error.find("may still be writing") != std::string::npos);
  // Read by a kernel before it on a stream of its own.
  CHECK(error_of_gpus([](Gpus &gpus) {
          gpus.run(gpus.side[0], 0, 0, gpus.load(gpus.b[0]));
          gpus.pass_on(gpus.a);
        }) == error);
  // Overwritten beside its send.
  error = error_of_gpus([](Gpus &gpus) {
    gpus.pass_on(gpus.a);
    gpus.run(gpus.side[1], 1, 0, gpus.store(gpus.a[1], 2));
  });
  CHECK(error.starts_with("[in-use] "));
  CHECK(error.find("device 1: store of bytes that the ncclSend at") != std::string::npos);
  // Read beside its send: right.
  CHECK(error_of_gpus([](Gpus &gpus) {
          gpus.pass_on(gpus.a);
          gpus.run(gpus.side[1], 1, 0, gpus.load(gpus.a[1]));
        }) == "");
  // What a group sends and receives is in no order.
  CHECK(error_of_gpus([](Gpus &gpus) {
          ncclGroupStart();
          ncclSend(gpus.b[0], elements, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
          ncclRecv(gpus.b[0], elements, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
          ncclSend(gpus.a[1], elements, ncclFloat16, 0, gpus.comm[1], gpus.stream[1]);
          ncclRecv(gpus.b[1], elements, ncclFloat16, 0, gpus.comm[1], gpus.stream[1]);
          ncclGroupEnd();
        }).starts_with("[in-flight] "));
}

TEST_CASE("devices: a sender does not know that the receiver has begun") {
  CHECK(error_of_gpus([](Gpus &gpus) {
          half *const a = gpus.a[0];
          cudaSetDevice(1);
          cudaDeviceEnablePeerAccess(0, 0);
          gpus.run(gpus.stream[1], 1, 0, gpus.load(a));
          ncclGroupStart();
          ncclSend(a, elements, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
          ncclRecv(gpus.b[1], elements, ncclFloat16, 0, gpus.comm[1], gpus.stream[1]);
          ncclGroupEnd();
          gpus.run(gpus.stream[0], 0, 1, gpus.store(a, 3));
        }).starts_with("[race] "));
}

TEST_CASE("devices: copies between devices") {
  const auto copy = [](Gpus &gpus, bool ordered) {
    cudaMemcpyPeerAsync(gpus.b[1], 1, gpus.a[0], 0, bytes, gpus.side[0]);
    cudaEventRecord(gpus.event[0], gpus.side[0]);
    if (ordered) cudaStreamWaitEvent(gpus.stream[1], gpus.event[0]);
    gpus.run(gpus.stream[1], 1, 0, gpus.load(gpus.b[1]));
    emulator::synchronise_devices();
    CHECK(gpus.first(gpus.b[1]) == 100);
    CHECK(emulator::take_link_bytes() == emulator::LinkBytes{{{0, 1}, bytes}});
  };
  CHECK(error_of_gpus([&](Gpus &gpus) { copy(gpus, true); }) == "");
  const std::string error = error_of_gpus([&](Gpus &gpus) { copy(gpus, false); });
  CHECK(error.starts_with("[in-flight] "));
  CHECK(error.find("load of bytes that the cudaMemcpyPeerAsync at") != std::string::npos);
  CHECK(error_of_gpus([](Gpus &gpus) {
          cudaMemcpyPeerAsync(gpus.b[1], 1, gpus.a[0], 0, bytes, gpus.side[0]);
          gpus.run(gpus.stream[0], 0, 0, gpus.store(gpus.a[0], 1));
        }).starts_with("[in-use] "));
  CHECK(error_of_gpus([](Gpus &gpus) {
          cudaMemcpyPeerAsync(gpus.b[0], 1, gpus.a[0], 0, bytes, gpus.side[0]);
        }).find("the memory is device 0's") != std::string::npos);
  CHECK(error_of_gpus([](Gpus &gpus) {
          cudaMemcpyPeerAsync(gpus.b[1], 1, gpus.a[0] + 1, 0, 2 * bytes, gpus.side[0]);
        }).find("outside of every allocation") != std::string::npos);
}

TEST_CASE("devices: a peer's memory needs access") {
  const auto peer = [](Gpus &gpus, bool access) {
    cudaSetDevice(1);
    if (access) cudaDeviceEnablePeerAccess(0, 0);
    gpus.run(gpus.stream[1], 1, 0, gpus.load(gpus.a[0]));
  };
  CHECK(error_of_gpus([&](Gpus &gpus) { peer(gpus, true); }) == "");
  const std::string error = error_of_gpus([&](Gpus &gpus) { peer(gpus, false); });
  CHECK(error.starts_with("[bounds] "));
  CHECK(error.find("device 1: load of device 0's memory without access to it") !=
        std::string::npos);
}

TEST_CASE("devices: what waits for ever is told as who waits for whom") {
  // A send and no receive.
  std::string error = error_of_gpus([](Gpus &gpus) {
    ncclGroupStart();
    ncclSend(gpus.a[0], elements, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
    ncclGroupEnd();
  });
  CHECK(error.starts_with("[deadlock] "));
  CHECK(error.find("device 0 waits in ncclSend for device 1, which has no ncclRecv for it; device "
                   "1 has nothing "
                   "left to do") != std::string::npos);
  // Once for several messages alike; and streams that only wait behind them are not named.
  error = error_of_gpus([](Gpus &gpus) {
    ncclGroupStart();
    for (int i = 0; i < 2; i++)
      ncclSend(gpus.a[0], elements, ncclFloat16, 1, gpus.comm[0], gpus.side[0]);
    ncclGroupEnd();
    cudaEventRecord(gpus.event[0], gpus.side[0]);
    cudaStreamWaitEvent(gpus.stream[0], gpus.event[0]);
    gpus.run(gpus.stream[0], 0, 0, gpus.load(gpus.a[0]));
  });
  CHECK(
      error.ends_with(": device 0 waits in ncclSend for device 1, which has no ncclRecv for it; "
                      "device 1 has nothing "
                      "left to do"));
  // Two groups where one is needed: each receives first.
  error = error_of_gpus([](Gpus &gpus) {
    for (const bool sends : {false, true}) {
      ncclGroupStart();
      for (int i = 0; i < 2; i++)
        if (sends)
          ncclSend(gpus.a[i], elements, ncclFloat16, 1 - i, gpus.comm[i], gpus.stream[i]);
        else
          ncclRecv(gpus.b[i], elements, ncclFloat16, 1 - i, gpus.comm[i], gpus.stream[i]);
      ncclGroupEnd();
    }
  });
  CHECK(error.find("device 0 waits in ncclRecv for device 1, whose ncclSend (devices_test.cpp:") !=
        std::string::npos);
  CHECK(error.find(") comes later in its stream; device 1 waits in ncclRecv for device 0, whose") !=
        std::string::npos);
  // A rank that does not come to the gather.
  error = error_of_gpus(
      [](Gpus &gpus) {
        ncclGroupStart();
        for (int i = 0; i < 2; i++)
          ncclAllGather(gpus.a[i], gpus.b[i], elements, ncclFloat16, gpus.comm[i], gpus.stream[i]);
        ncclGroupEnd();
      },
      3);
  CHECK(
      error.find("device 0 waits in ncclAllGather for device 2, which has no ncclAllGather for it; "
                 "device 1 waits in") != std::string::npos);
  CHECK(error.find("device 2 has nothing left to do") != std::string::npos);
  // A stream that waits for what comes behind its own message.
  error = error_of_gpus([](Gpus &gpus) {
    ncclGroupStart();
    ncclSend(gpus.a[0], elements, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
    ncclGroupEnd();
    cudaEventRecord(gpus.event[0], gpus.stream[0]);
    cudaStreamWaitEvent(gpus.stream[1], gpus.event[0]);
    ncclGroupStart();
    ncclRecv(gpus.b[1], elements, ncclFloat16, 0, gpus.comm[1], gpus.stream[1]);
    ncclGroupEnd();
  });
  CHECK(error.find("device 0 waits in ncclSend for device 1, whose ncclRecv (") !=
        std::string::npos);
  CHECK(error.find("waits in cudaStreamWaitEvent for an event of device 0") != std::string::npos);
  // One thread, and no group.
  error = error_of_gpus([](Gpus &gpus) {
    ncclAllGather(gpus.a[0], gpus.b[0], elements, ncclFloat16, gpus.comm[0], gpus.stream[0]);
  });
  CHECK(error.starts_with("[deadlock] "));
  CHECK(error.find("ncclAllGather of rank 0 outside of a group") != std::string::npos);
}

TEST_CASE("devices: what belongs together must be alike") {
  const auto send = [](std::size_t count, ncclDataType_t type) {
    return error_of_gpus([=](Gpus &gpus) {
      ncclGroupStart();
      ncclSend(gpus.a[0], elements, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
      ncclRecv(gpus.b[1], count, type, 0, gpus.comm[1], gpus.stream[1]);
      ncclGroupEnd();
    });
  };
  CHECK(send(elements, ncclFloat16) == "");
  CHECK(send(elements / 2, ncclFloat16).starts_with("[message] "));
  CHECK(send(elements / 2, ncclFloat16)
            .find("ncclSend of 256 fp16 elements by rank 0, ncclRecv of 128 fp16 "
                  "elements by rank 1") != std::string::npos);
  CHECK(send(elements, ncclBfloat16).starts_with("[message] "));
  CHECK(error_of_gpus([](Gpus &gpus) {
          ncclGroupStart();
          for (int i = 0; i < 2; i++)
            ncclAllGather(gpus.a[i], gpus.b[i], elements - i, ncclFloat16, gpus.comm[i],
                          gpus.stream[i]);
          ncclGroupEnd();
        }).starts_with("[message] "));
  // Messages of one pair go in their order.
  CHECK(error_of_gpus([](Gpus &gpus) {
          ncclGroupStart();
          for (const std::size_t count : {elements, elements / 2})
            ncclSend(gpus.a[0], count, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
          for (const std::size_t count : {elements / 2, elements})
            ncclRecv(gpus.b[1] + (count == elements ? elements : 0), count, ncclFloat16, 0,
                     gpus.comm[1], gpus.stream[1]);
          ncclGroupEnd();
        }).starts_with("[message] "));
}

TEST_CASE("devices: what CUDA and NCCL refuse") {
  const auto refused = [](const std::function<void(Gpus &)> &work, const std::string &why) {
    const std::string error = error_of_gpus(work);
    CAPTURE(error);
    CHECK(error.find(why) != std::string::npos);
  };
  refused([](Gpus &) { cudaSetDevice(2); }, ": cudaSetDevice(2): there are 2 devices");
  refused([](Gpus &gpus) { gpus.run(gpus.stream[1], 0, 0, gpus.load(gpus.a[0])); },
          "launch refused: the stream is device 1's, and device 0 is the current one");
  CHECK(error_of_gpus([](Gpus &gpus) {
          gpus.run(gpus.stream[1], 0, 0, gpus.load(gpus.a[0]));
        }).starts_with("[launch] devices_test.cpp:"));
  refused([](Gpus &gpus) { cudaEventRecord(gpus.event[0], gpus.stream[1]); },
          "the event is device 0's, and the stream is device 1's");
  refused([](Gpus &gpus) { ncclSend(gpus.a[0], 1, ncclFloat16, 2, gpus.comm[0], gpus.stream[0]); },
          "ncclSend: rank 2 of 2");
  refused([](Gpus &gpus) { ncclSend(gpus.a[0], 1, ncclFloat16, 1, gpus.comm[0], gpus.stream[1]); },
          "the communicator is device 0's, and the stream is device 1's");
  refused([](Gpus &) { ncclGroupEnd(); }, "ncclGroupEnd without an ncclGroupStart");
  refused(
      [](Gpus &gpus) {
        ncclGroupStart();
        ncclSend(gpus.a[0], 1, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
        ncclRecv(gpus.b[1], 1, ncclFloat16, 0, gpus.comm[1], gpus.stream[1]);
      },
      "ncclGroupStart without an ncclGroupEnd: no call of this group is made");
  const auto made_within = [](Gpus &gpus, bool ends) {
    ncclGroupStart();
    ncclCommInitAll(gpus.comm.data(), 2, nullptr);
    if (ends) ncclGroupEnd(), ncclGroupStart();
    ncclSend(gpus.a[0], 1, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
    ncclRecv(gpus.b[1], 1, ncclFloat16, 0, gpus.comm[1], gpus.stream[1]);
    ncclGroupEnd();
  };
  refused([&](Gpus &gpus) { made_within(gpus, false); }, "is ready after ncclGroupEnd");
  CHECK(error_of_gpus([&](Gpus &gpus) { made_within(gpus, true); }) == "");
  refused(
      [](Gpus &gpus) {
        ncclCommDestroy(gpus.comm[0]);
        ncclSend(gpus.a[0], 1, ncclFloat16, 1, gpus.comm[0], gpus.stream[0]);
      },
      "ncclSend after ncclCommDestroy");
  refused(
      [](Gpus &gpus) {
        ncclGroupStart();
        ncclSend(gpus.b[0], 1, ncclFloat16, 0, gpus.comm[1], gpus.stream[1]);
      },
      "the memory is device 0's");
}

TEST_CASE("devices: a launch that is refused names its line") {
  const std::string error = error_of_gpus([](Gpus &gpus) {
    cudaSetDevice(1);
    launch_on<Nothing>(
        gpus.stream[1], +[](int) {}, dim3(0), dim3(1), 0);
  });
  CHECK(error.starts_with("[launch] devices_test.cpp:"));
  CHECK(error.ends_with(": launch refused: grid.x is 0; 1 to 2147483647 is allowed (device 1)"));
}

TEST_CASE("devices: a hop that there is not has no event") {
  HopEvents events;
  events.push_back(nullptr);
  events.push_back(nullptr);
  CHECK(events[1] == nullptr);
  for (const int hop : {-1, 2})
    CHECK_THROWS_WITH(events[hop],
                      ("hop " + std::to_string(hop) + " has no event: hops 0 to 1 have").c_str());
}

TEST_CASE("devices: an error in a kernel names its device") {
  const std::string error = error_of_gpus([](Gpus &gpus) {
    half *const a = gpus.a[1];
    gpus.run(gpus.stream[1], 1, 0, [=] { read(Matrix<half>{a, rows, d}(rows, 0)); });
  });
  CHECK(error.starts_with("[bounds] "));
  CHECK(error.ends_with("(device 1)"));
}

namespace {

/// What the streams of two devices do, a line each: "0 kernel 0-2", the device, and when it begins and ends. The same
/// under all seeds.
std::vector<std::string> traced(const std::function<void(Gpus &)> &work) {
  std::vector<std::string> one;
  for (int seed = 1; seed <= kSeeds; seed++) {
    Gpus gpus(2, static_cast<std::uint64_t>(seed));
    emulator::settings.profile = emulator::settings.streams = true;
    emulator::take_profile();
    work(gpus);
    emulator::synchronise_devices();
    std::vector<std::string> lines;
    const std::vector<emulator::TraceSlice> slices = emulator::take_profile().slices;
    for (const emulator::TraceSlice &slice : slices) {
      const std::string cause =
          slice.cause < 0
              ? ""
              : std::string(" after ") + slices[static_cast<std::size_t>(slice.cause)].what;
      lines.push_back(std::to_string(slice.device) + " " + slice.what + " " +
                      std::to_string(slice.begin) + "-" + std::to_string(slice.end) + cause);
    }
    if (seed == 1) one = lines;
    CHECK(lines == one);
  }
  return one;
}

/// A message from one device to the other, on these streams. It takes 16 turns: 512 bytes.
void pass(Gpus &gpus, std::vector<cudaStream_t> &on, int from, std::size_t place = 0) {
  ncclSend(gpus.a[from], elements, ncclFloat16, 1 - from, gpus.comm[from], on[from]);
  ncclRecv(gpus.b[1 - from] + place, elements, ncclFloat16, from, gpus.comm[1 - from],
           on[1 - from]);
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("devices: in the trace a message goes beside a kernel, or after it if an event says so") {
  const auto work = [](bool waits) {
    return [=](Gpus &gpus) {
      gpus.run(gpus.stream[0], 0, 0, gpus.load(gpus.a[0]));
      if (waits) {
        cudaEventRecord(gpus.event[0], gpus.stream[0]);
        cudaStreamWaitEvent(gpus.side[0], gpus.event[0]);
      }
      ncclGroupStart();
      pass(gpus, gpus.side, 0);
      ncclGroupEnd();
      gpus.run(gpus.side[1], 1, 1, gpus.load(gpus.b[1]));
    };
  };
  CHECK(traced(work(false)) == Lines{"0 kernel 0-2", "0 ncclSend 0-16",
                                     "1 ncclRecv 0-16 after ncclSend", "1 kernel 16-18"});
  CHECK(traced(work(true)) == Lines{"0 kernel 0-2", "0 cudaStreamWaitEvent 0-2 after kernel",
                                    "0 ncclSend 2-18", "1 ncclRecv 2-18 after ncclSend",
                                    "1 kernel 18-20"});
}

TEST_CASE("devices: in the trace a link carries one message at a time in each direction") {
  CHECK(traced([](Gpus &gpus) {
          ncclGroupStart();
          pass(gpus, gpus.stream, 0);
          pass(gpus, gpus.stream, 1);
          pass(gpus, gpus.stream, 0, elements);
          ncclGroupEnd();
          cudaEventRecord(gpus.event[1], gpus.stream[1]);
          cudaStreamWaitEvent(gpus.side[0], gpus.event[1]);
          cudaMemcpyPeerAsync(gpus.b[0] + elements, 0, gpus.a[1], 1, bytes, gpus.side[0]);
        }) == Lines{"0 ncclRecv 0-16 after ncclSend", "0 ncclSend 0-16", "0 ncclSend 16-32",
                    "0 cudaStreamWaitEvent 0-32 after ncclRecv", "0 cudaMemcpyPeerAsync 32-48",
                    "1 ncclRecv 0-16 after ncclSend", "1 ncclRecv 16-32 after ncclSend",
                    "1 ncclSend 0-16"});
}

TEST_CASE(
    "devices: in the trace of two copies that need one link the first is that which can begin "
    "first") {
  CHECK(traced([](Gpus &gpus) {
          gpus.run(gpus.stream[0], 0, 0, gpus.load(gpus.a[0]));
          cudaMemcpyPeerAsync(gpus.b[0], 0, gpus.a[1], 1, bytes, gpus.stream[0]);
          cudaMemcpyPeerAsync(gpus.b[0] + elements, 0, gpus.a[1], 1, bytes, gpus.side[0]);
        }) == Lines{"0 kernel 0-2", "0 cudaMemcpyPeerAsync 16-32", "0 cudaMemcpyPeerAsync 0-16"});
}

TEST_CASE("devices: in the trace an all-gather begins when the last rank has come") {
  CHECK(traced([](Gpus &gpus) {
          gpus.run(gpus.stream[1], 1, 0, gpus.load(gpus.a[1]));
          ncclGroupStart();
          for (int i = 0; i < 2; i++)
            ncclAllGather(gpus.a[i], gpus.b[i], elements, ncclFloat16, gpus.comm[i],
                          gpus.stream[i]);
          ncclGroupEnd();
        }) == Lines{"0 ncclAllGather 2-18", "1 kernel 0-2", "1 ncclAllGather 2-18"});
}

// SPDX-License-Identifier: MIT
#include "common/emulator/devices.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <set>

#include "common/emulator/accesses.h"
#include "common/emulator/memory.h"
#include "common/emulator/sites.h"
#include "common/emulator/timeline.h"

namespace emulator {

/// What is known of each stream, by its number: so many of its actions.
using StreamClock = std::vector<unsigned>;

/// A moment of a stream, which cudaEventRecord takes and others wait for.
struct EventMoment {
  bool reached = false;
  StreamClock clock;
  int device;
  SiteId site;
  Progress progress = {};  // of the stream in which it was recorded
};

struct Event {
  int device;
  std::shared_ptr<EventMoment> last;  // null: not recorded yet
};

/// One call of a group of NCCL's.
struct Message {
  enum Kind { kSend, kReceive, kGather } kind;
  Communicator *comm;
  const std::byte *from = nullptr;
  std::byte *to = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclUint8;
  int peer = 0;
  unsigned gather = 0;  // which one of its communicator
  SiteId site = 0;
  bool done = false;

  std::size_t bytes() const {
    return count * (type == ncclUint8 ? 1 : type == ncclFloat32 ? 4 : 2);
  }
  const char *name() const {
    return kind == kSend ? "ncclSend" : kind == kReceive ? "ncclRecv" : "ncclAllGather";
  }
};

/// What a stream does at a time: a launch, a copy, a group of messages, or an event's record or wait.
struct Action {
  Stream *stream;
  unsigned number = 0;  // in its stream, from 1
  SiteId site = 0;
  StreamClock clock = {};    // what it knows when it begins
  StreamClock learned = {};  // from messages, when it has ended
  std::function<void(const Action &)> work = {};
  std::shared_ptr<EventMoment> event = {};
  bool waits = false;  // for the event, which it records otherwise
  std::vector<Message> messages = {};
};

namespace {

/// Bytes that an action reads or writes.
struct Use {
  const std::byte *first;
  std::size_t bytes;
  bool written;
  bool is_kernel;    // by its threads; else by a copy engine or by NCCL
  const char *what;  // "load", "ncclSend"
  SiteId site;
};

/// An action's uses, kept until all others know of them. The messages of a group are in no order: each has its own.
struct Done {
  unsigned stream, number;
  int device;
  std::vector<Use> uses;
};

}  // namespace

struct Stream {
  int device;
  unsigned number;  // among all streams
  std::deque<Action> queue = {};
  Track track;
  unsigned queued = 0;     // so many actions ever
  StreamClock clock = {};  // what its next action knows
};

struct Communicator {
  int rank, ranks;
  Communicator *first;  // rank 0's, an array
  Stream *stream = nullptr;
  unsigned gathers = 0;
  bool is_ready = true;  // false from its making within a group to the group's end
};

namespace {

struct Devices {
  int count = 1, current = 0;
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::unique_ptr<Event>> events;
  std::vector<std::unique_ptr<Communicator[]>> communicators;
  std::set<std::pair<int, int>> access;  // device, its peer
  StreamClock host;                      // what the host knows
  std::vector<Done> done;
  LinkBytes links;
  Timeline timeline;
  int groups = 0;           // of ncclGroupStart, one in another
  SiteId group_begins = 0;  // where the outermost of them is
  std::vector<std::pair<Stream *, Message>> called;
  std::mt19937_64 random;
};
Devices devices;
std::atomic<std::uint64_t> queued = 0;  // launches

[[noreturn]] void refuse(Fault fault, SiteId site, const std::string &why) {
  throw KernelError((site ? describe(line_of(site)) + ": " : "") + tag_of(fault) + " " + why);
}

std::string device_name(int device) {
  return "device " + std::to_string(device);
}

void join(StreamClock &clock, const StreamClock &other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (std::size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

bool knows(const StreamClock &clock, unsigned stream, unsigned number) {
  return stream < clock.size() && clock[stream] >= number;
}

void add(Stream *stream, Action action) {
  action.number = ++stream->queued;
  action.clock = devices.host;
  stream->queue.push_back(std::move(action));
}

/// The head of a stream begins: it knows what the stream does.
void begin(Action &action) {
  join(action.clock, action.stream->clock);
}

/// It has ended.
void end(Stream *stream) {
  const unsigned number = stream->queue.front().number;
  join(stream->clock, stream->queue.front().clock);
  join(stream->clock, stream->queue.front().learned);
  if (stream->clock.size() <= stream->number) stream->clock.resize(stream->number + 1);
  stream->clock[stream->number] = number;
  stream->queue.pop_front();
}

// --- who uses which bytes --------------------------------------------------------------------------

/// Reports two uses of one place that nothing orders, one of them a write. The text is the same whichever came
/// first.
[[noreturn]] void report(const Use &a, int device_a, const Use &b, int device_b) {
  // `other` is who may still be at it: an engine rather than a kernel, who writes rather than who reads.
  const bool swap = a.is_kernel != b.is_kernel ? b.is_kernel
                    : a.written != b.written   ? a.written != a.is_kernel
                                               : comes_before(b.site, a.site);
  const Use &one = swap ? b : a, &other = swap ? a : b;
  const std::string on = device_name(swap ? device_a : device_b);
  const std::string at =
      std::string("the ") + other.what + " at " + describe(line_of(other.site)) + " by " + on;
  const std::string what = other.is_kernel ? " races with " + at
                           : other.written ? " of bytes that " + at + " may still be writing"
                                           : " of bytes that " + at + " may still be reading";
  refuse(other.is_kernel ? Fault::kRace
         : other.written ? Fault::kInFlight
                         : Fault::kInUse,
         one.site,
         device_name(swap ? device_b : device_a) + ": " + one.what + what +
             ": no stream, event or message orders the two");
}

/// Remembers what an action uses, and checks it against what it does not know of.
void note(const Action &action, std::vector<Use> uses) {
  for (const Done &other : devices.done) {
    const bool same_group = other.stream == action.stream->number && other.number == action.number;
    if (!same_group && knows(action.clock, other.stream, other.number)) continue;
    for (const Use &before : other.uses)
      for (const Use &use : uses)
        if ((use.written || before.written) && use.first < before.first + before.bytes &&
            before.first < use.first + use.bytes)
          report(before, other.device, use, action.stream->device);
  }
  devices.done.push_back(
      {action.stream->number, action.number, action.stream->device, std::move(uses)});
}

/// Checks that these bytes are allocated, and on which device.
void check_bytes(const void *memory, std::size_t bytes, int device, const char *what, SiteId site) {
  const Allocation *allocation = find_allocation(memory);
  const auto *byte = static_cast<const std::byte *>(memory);
  if (!allocation || byte + bytes > allocation->memory + allocation->bytes)
    refuse(
        Fault::kBounds, site,
        std::string(what) + " of " + std::to_string(bytes) + " bytes outside of every allocation");
  if (allocation->device != device)
    refuse(Fault::kBounds, site,
           std::string(what) + " of " + device_name(device) + ": the memory is " +
               device_name(allocation->device) + "'s");
}

/// What the kernel that has just run did to memory.
void note_launch(const Action &action) {
  std::vector<Use> uses;
  for (const Touched &touched : touched_by_launch()) {
    const int owner = touched.allocation->device, device = action.stream->device;
    const char *const what = touched.written ? "store" : "load";
    if (owner != device && !devices.access.contains({device, owner}))
      refuse(Fault::kBounds, touched.site,
             device_name(device) + ": " + what + " of " + device_name(owner) +
                 "'s memory without access to it: cudaDeviceEnablePeerAccess");
    uses.push_back({touched.allocation->memory + touched.offset, touched.bytes, touched.written,
                    true, what, touched.site});
  }
  // Atomics of one launch do not race. Those of two launches do: each counts on what the other changes.
  for (const auto &[address, site] : atomics_of_launch())
    uses.push_back({reinterpret_cast<const std::byte *>(address), sizeof *address, true, true,
                    "atomic", site});
  note(action, std::move(uses));
}

/// The first place in the source at which the kernel that has just run touched memory.
SiteId first_place() {
  SiteId first = 0;
  for (const Touched &touched : touched_by_launch())
    if (!first || comes_before(touched.site, first)) first = touched.site;
  return first;
}

// --- NCCL ------------------------------------------------------------------------------------------

/// The action at the head of the stream of a rank's communicator that has a message of this kind which is not
/// done, the first of them; or nothing.
Message *pending(const Communicator &comm, Message::Kind kind, int peer, unsigned gather = 0) {
  if (!comm.stream || comm.stream->queue.empty()) return nullptr;
  for (Message &message : comm.stream->queue.front().messages)
    if (message.comm == &comm && message.kind == kind && !message.done &&
        (kind == Message::kGather ? message.gather == gather : message.peer == peer))
      return &message;
  return nullptr;
}

/// Two calls that belong to each other must say the same.
void check_alike(const Message &a, const Message &b) {
  if (a.count == b.count && a.type == b.type) return;
  const auto say = [](const Message &message) {
    static const char *const types[] = {"8-bit", "fp16", "bf16", "fp32"};
    return std::to_string(message.count) + " " + types[message.type] + " elements by rank " +
           std::to_string(message.comm->rank);
  };
  refuse(Fault::kMessage, a.site,
         std::string(a.name()) + " of " + say(a) + ", " + b.name() + " of " + say(b) + " (" +
             describe(line_of(b.site)) + "): they must be equal");
}

/// A message is ready if all that take part have come to it: then these, by rank; else nothing. Of a send and
/// its receive the send is asked.
std::vector<Message *> ready(Message &message) {
  const Communicator &comm = *message.comm;
  if (message.done || message.kind == Message::kReceive) return {};
  std::vector<Message *> all;
  if (message.kind == Message::kSend) {
    if (pending(comm, Message::kSend, message.peer) != &message) return {};  // they go in order
    all = {&message, pending(comm.first[message.peer], Message::kReceive, comm.rank)};
  } else {
    for (int rank = 0; rank < comm.ranks; rank++)
      all.push_back(pending(comm.first[rank], Message::kGather, 0, message.gather));
  }
  if (std::count(all.begin(), all.end(), nullptr)) return {};
  return all;
}

Action &action_of(const Message &message) {
  return message.comm->stream->queue.front();
}

void finish_if_done(Stream *stream) {
  Action &action = stream->queue.front();
  for (const Message &message : action.messages)
    if (!message.done) return;
  devices.timeline.end_group(stream->track);
  end(stream);
}

/// Carries the bytes of a send to its receive, or those of all ranks to all.
void carry(const std::vector<Message *> &all) {
  for (Message *message : all) begin(action_of(*message));
  const auto use = [](const Message &message, const void *first, std::size_t bytes, bool written) {
    return Use{
        static_cast<const std::byte *>(first), bytes, written, false, message.name(), message.site};
  };
  const Message &send = *all.front();
  if (send.kind == Message::kSend) {
    const Message &receive = *all.back();
    check_alike(send, receive);
    note(action_of(send), {use(send, send.from, send.bytes(), false)});
    note(action_of(receive), {use(receive, receive.to, send.bytes(), true)});
    std::memmove(receive.to, send.from, send.bytes());
    // The receiver knows what came before the send. The sender may be done before the receiver begins.
    join(action_of(receive).learned, action_of(send).clock);
    if (settings.streams)
      devices.timeline.send(send.comm->stream->track, send.site, receive.comm->stream->track,
                            receive.site, send.bytes());
    if (send.comm != receive.comm)
      devices.links[{send.comm->rank, receive.comm->rank}] += send.bytes();
  } else {
    for (const Message *message : all) check_alike(send, *message);
    for (const Message *message : all) {
      // In place: a rank's own part already is where it belongs.
      const bool in_place = message->from == message->to + message->comm->rank * send.bytes();
      std::vector<Use> uses = {use(*message, message->to, all.size() * send.bytes(), true)};
      if (!in_place) uses.push_back(use(*message, message->from, send.bytes(), false));
      note(action_of(*message), uses);
    }
    for (const Message *to : all)
      for (const Message *from : all)
        std::memmove(to->to + from->comm->rank * send.bytes(), from->from, send.bytes());
    for (const Message *to : all)
      for (const Message *from : all) join(action_of(*to).learned, action_of(*from).clock);
    if (settings.streams) {
      std::vector<Track *> tracks;
      std::vector<SiteId> sites;
      for (const Message *message : all) {
        tracks.push_back(&message->comm->stream->track);
        sites.push_back(message->site);
      }
      devices.timeline.gather(tracks, sites, send.bytes());
    }
    // Along a ring, each rank passes on all parts but its neighbour's.
    for (int rank = 0; rank < send.comm->ranks && send.comm->ranks > 1; rank++)
      devices.links[{rank, (rank + 1) % send.comm->ranks}] += (all.size() - 1) * send.bytes();
  }
  for (Message *message : all) message->done = true;
  for (const Message *message : std::vector<Message *>(all)) {
    Stream *const stream = message->comm->stream;
    if (!stream->queue.empty() && !stream->queue.front().messages.empty()) finish_if_done(stream);
  }
}

// --- what runs when --------------------------------------------------------------------------------

/// What may run now, and from which time of its streams on.
struct Choice {
  std::uint64_t time;
  std::function<void()> run;
};
std::vector<Choice> choices() {
  std::vector<Choice> all;
  for (const auto &each : devices.streams) {
    Stream *const stream = each.get();
    if (stream->queue.empty()) continue;
    Action &action = stream->queue.front();
    if (action.work) {
      all.push_back({stream->track.now.time, [stream, &action] {
                       begin(action);
                       action.work(action);
                       end(stream);
                     }});
    } else if (action.event && (!action.waits || action.event->reached)) {
      const auto run = [stream, &action] {
        begin(action);
        const std::shared_ptr<EventMoment> event = action.event;
        const bool waits = action.waits;
        if (waits) action.learned = event->clock;
        if (waits && settings.streams)
          devices.timeline.wait(stream->track, action.site, event->progress, event->device);
        end(stream);
        if (!waits) *event = {true, stream->clock, event->device, event->site, stream->track.now};
      };
      all.push_back({stream->track.now.time, run});
    }
    for (Message &message : action.messages)
      if (const std::vector<Message *> parts = ready(message);
          !parts.empty() && (message.kind == Message::kSend || parts.front() == &message)) {
        std::uint64_t time = 0;
        for (const Message *part : parts) time = std::max(time, part->comm->stream->track.now.time);
        all.push_back({time, [parts] { carry(parts); }});
      }
  }
  return all;
}

/// "device 1, which has no ncclRecv for it", or where the call stands that would end the wait.
std::string peer_of(const Message &message, int rank) {
  const Communicator &peer = message.comm->first[rank];
  const Message::Kind kind = message.kind == Message::kSend      ? Message::kReceive
                             : message.kind == Message::kReceive ? Message::kSend
                                                                 : Message::kGather;
  const std::deque<Action> none;
  for (const Action &action : peer.stream ? peer.stream->queue : none)
    for (const Message &other : action.messages)
      if (other.comm == &peer && other.kind == kind && !other.done &&
          (kind == Message::kGather ? other.gather == message.gather
                                    : other.peer == message.comm->rank))
        return device_name(rank) + ", whose " + other.name() + " (" +
               describe(line_of(other.site)) + ") comes later in its stream";
  return device_name(rank) + ", which has no " + Message{kind, nullptr}.name() + " for it";
}

/// The ranks for which a message waits: its peer, or those that have not come to the all-gather.
std::vector<int> missing(const Message &message) {
  if (message.kind != Message::kGather) return {message.peer};
  std::vector<int> ranks;
  for (int rank = 0; rank < message.comm->ranks; rank++)
    if (!pending(message.comm->first[rank], Message::kGather, 0, message.gather))
      ranks.push_back(rank);
  return ranks;
}

/// True if another stream's first action may wait for what this stream would do later.
bool others_wait_for(const Stream &stream) {
  for (const Action &action : stream.queue) {
    if (!action.messages.empty()) return true;
    for (const auto &other : devices.streams)
      if (!action.waits && action.event && !other->queue.empty() && other->queue.front().waits &&
          other->queue.front().event == action.event)
        return true;
  }
  return false;
}

/// Says who waits for whom for ever: messages first, then the streams between them. What only follows from these is
/// left out.
[[noreturn]] void report_deadlock() {
  std::vector<std::string> texts;
  SiteId first = 0;
  const auto say = [&](const Stream &stream, SiteId site, const std::string &what) {
    if (!first) first = site;
    const std::string text = device_name(stream.device) +
                             (site == first ? "" : " (" + describe(line_of(site)) + ")") +
                             " waits " + what;
    if (!std::count(texts.begin(), texts.end(), text)) texts.push_back(text);
  };
  for (const auto &stream : devices.streams) {
    if (stream->queue.empty()) continue;
    for (const Message &message : stream->queue.front().messages)
      if (!message.done)
        for (const int rank : missing(message))
          say(*stream, message.site,
              "in " + std::string(message.name()) + " for " + peer_of(message, rank));
  }
  const bool messages = !texts.empty();
  for (const auto &stream : devices.streams) {
    if (stream->queue.empty() || !stream->queue.front().event) continue;
    const Action &action = stream->queue.front();
    if (!messages || others_wait_for(*stream))
      say(*stream, action.site,
          "in cudaStreamWaitEvent for an event of " + device_name(action.event->device) + " (" +
              describe(line_of(action.event->site)) + ")");
  }
  for (int device = 0; device < devices.count; device++)
    if (std::none_of(devices.streams.begin(), devices.streams.end(), [&](const auto &stream) {
          return stream->device == device && !stream->queue.empty();
        }))
      texts.push_back(device_name(device) + " has nothing left to do");
  std::string all;
  for (const std::string &text : texts) all += (all.empty() ? "" : "; ") + text;
  refuse(Fault::kDeadlock, first, all);
}

/// Runs what is drawn until `done` says so; for a trace what may begin first.
template <class Done>
void run_until(const Done &is_done) {
  while (!is_done()) {
    const std::vector<Choice> all = choices();
    if (all.empty()) report_deadlock();
    const auto first = std::min_element(
        all.begin(), all.end(), [](const Choice &a, const Choice &b) { return a.time < b.time; });
    (settings.streams ? *first : all[devices.random() % all.size()]).run();
  }
}

}  // namespace

void begin_devices(int count) {
  devices = {};
  queued = 0;
  devices.count = count;
  devices.random.seed(settings.seed);
}

int current_device() {
  return devices.current;
}

std::uint64_t queued_launches() {
  return queued;
}

void launch_on(void *stream, Dim3 grid, Dim3 block, std::size_t shared_bytes,
               const std::function<void()> &thread, const LaunchAttributes &attributes,
               Where where) {
  const auto found =
      std::find_if(devices.streams.begin(), devices.streams.end(),
                   [&](const auto &other) { return static_cast<void *>(other.get()) == stream; });
  if (found == devices.streams.end()) {
    run(grid, block, shared_bytes, thread, attributes);
    return;
  }
  Stream *const queue = found->get();
  if (queue->device != devices.current)
    refuse(Fault::kLaunch, site_of(where),
           "launch refused: the stream is " + device_name(queue->device) + "'s, and " +
               device_name(devices.current) + " is the current one: cudaSetDevice");
  Action action{queue};
  action.site = site_of(where);
  queued++;
  action.work = [=](const Action &self) {
    queued--;
    const Counts before = settings.streams ? counted() : Counts{};
    try {
      run(grid, block, shared_bytes, thread, attributes);
    } catch (const KernelError &error) {
      const std::string what = error.what(), of = " (" + device_name(self.stream->device) + ")";
      // What refuses the launch itself names no line.
      throw KernelError((what.starts_with("[") ? describe(line_of(self.site)) + ": " : "") + what +
                        of);
    }
    note_launch(self);
    if (!settings.streams) return;
    Counts counts = counted();
    for (std::size_t i = 0; i < counts.size(); i++) counts[i] -= before[i];
    devices.timeline.run(self.stream->track, first_place(), counts);
  };
  add(queue, std::move(action));
}

void synchronise_devices() {
  if (devices.groups)
    refuse(Fault::kMessage, devices.group_begins,
           "ncclGroupStart without an ncclGroupEnd: no call of this group is made");
  run_until([] {
    return std::all_of(devices.streams.begin(), devices.streams.end(),
                       [](const auto &stream) { return stream->queue.empty(); });
  });
  for (const auto &stream : devices.streams) join(devices.host, stream->clock);
  devices.done.clear();  // all that comes later knows of it
}

void rewrite(void *stream, const void *memory, std::size_t bytes, Where where) {
  Action action{static_cast<Stream *>(stream)};
  action.site = site_of(where);
  action.work = [=](const Action &self) {
    note(self, {{static_cast<const std::byte *>(memory), bytes, true, false, "caller's write",
                 self.site}});
  };
  add(action.stream, std::move(action));
}

LinkBytes take_link_bytes() {
  return std::exchange(devices.links, {});
}

std::vector<TraceSlice> take_streams() {
  return devices.timeline.take();
}

// --- CUDA's runtime --------------------------------------------------------------------------------

namespace api {

cudaError_t cudaSetDevice(int device, Where where) {
  if (device < 0 || device >= devices.count)
    refuse(Fault::kLaunch, site_of(where),
           "cudaSetDevice(" + std::to_string(device) + "): there are " +
               std::to_string(devices.count) + " devices, from 0 on");
  devices.current = device;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, std::size_t bytes) {
  *memory = allocate(bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
  synchronise_devices();  // as CUDA does
  release(memory);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  const auto of_device = static_cast<unsigned>(
      std::count_if(devices.streams.begin(), devices.streams.end(),
                    [](const auto &other) { return other->device == devices.current; }));
  devices.streams.push_back(
      std::make_unique<Stream>(Stream{.device = devices.current,
                                      .number = static_cast<unsigned>(devices.streams.size()),
                                      .track = {devices.current, of_device}}));
  *stream = devices.streams.back().get();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  devices.events.push_back(std::make_unique<Event>(Event{devices.current, nullptr}));
  *event = devices.events.back().get();
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream, Where where) {
  const SiteId site = site_of(where);
  if (event->device != stream->device)
    refuse(Fault::kLaunch, site,
           "cudaEventRecord: the event is " + device_name(event->device) +
               "'s, and the stream is " + device_name(stream->device) + "'s");
  event->last = std::make_shared<EventMoment>(EventMoment{false, {}, event->device, site});
  Action action{stream};
  action.site = site;
  action.event = event->last;
  add(stream, std::move(action));
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned, Where where) {
  if (!event->last) return cudaSuccess;  // not recorded yet: CUDA does not wait for what will come
  Action action{stream};
  action.site = site_of(where);
  action.event = event->last;
  action.waits = true;
  add(stream, std::move(action));
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  run_until([&] { return stream->queue.empty(); });
  join(devices.host, stream->clock);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  for (const auto &stream : devices.streams)
    if (stream->device == devices.current) cudaStreamSynchronize(stream.get());
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned, Where where) {
  if (peer < 0 || peer >= devices.count || peer == devices.current)
    refuse(Fault::kLaunch, site_of(where),
           "cudaDeviceEnablePeerAccess(" + std::to_string(peer) + ") of " +
               device_name(devices.current) + ": must be another device");
  devices.access.insert({devices.current, peer});
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                std::size_t bytes, cudaStream_t stream, Where where) {
  const SiteId site = site_of(where);
  constexpr const char *kName = "cudaMemcpyPeerAsync";
  check_bytes(to, bytes, to_device, kName, site);
  check_bytes(from, bytes, from_device, kName, site);
  Action action{stream};
  action.site = site;
  action.work = [=](const Action &self) {
    const auto use = [&](const void *first, bool written) {
      return Use{static_cast<const std::byte *>(first), bytes, written, false, kName, site};
    };
    note(self, {use(from, false), use(to, true)});
    std::memmove(to, from, bytes);
    if (settings.streams)
      devices.timeline.copy(self.stream->track, kName, site, from_device, to_device, bytes);
    if (to_device != from_device) devices.links[{from_device, to_device}] += bytes;
  };
  add(stream, std::move(action));
  return cudaSuccess;
}

// --- NCCL ------------------------------------------------------------------------------------------

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int count, const int *chosen, Where where) {
  if (count < 1 || count > devices.count || chosen)
    refuse(Fault::kLaunch, site_of(where),
           "ncclCommInitAll of " + std::to_string(count) + " ranks: there are " +
               std::to_string(devices.count) +
               " devices, and the emulator accepts only the first ones");
  devices.communicators.push_back(
      std::make_unique<Communicator[]>(static_cast<std::size_t>(count)));
  Communicator *const first = devices.communicators.back().get();
  for (int rank = 0; rank < count; rank++) {
    first[rank] = {rank, count, first};
    first[rank].is_ready = devices.groups == 0;
    comms[rank] = &first[rank];
  }
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm->stream) cudaStreamSynchronize(comm->stream);
  comm->ranks = 0;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart(Where where) {
  if (devices.groups++ == 0) devices.group_begins = site_of(where);
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(Where where) {
  if (devices.groups == 0)
    refuse(Fault::kMessage, site_of(where), "ncclGroupEnd without an ncclGroupStart");
  if (--devices.groups) return ncclSuccess;
  for (const auto &made : devices.communicators)
    for (int rank = 0; rank < made[0].ranks; rank++) made[rank].is_ready = true;
  std::vector<std::pair<Stream *, Message>> called = std::exchange(devices.called, {});
  while (!called.empty()) {  // one action for each rank
    const Communicator *const comm = called.front().second.comm;
    Action action{called.front().first};
    action.site = site_of(where);
    for (const auto &[stream, message] : called)
      if (message.comm == comm) action.messages.push_back(message);
    std::erase_if(called, [&](const auto &call) { return call.second.comm == comm; });
    add(action.stream, std::move(action));
  }
  return ncclSuccess;
}

namespace {

void call(Message message, Stream *stream, Where where) {
  Communicator &comm = *message.comm;
  message.site = site_of(where);
  const std::string name = message.name();
  if (comm.ranks == 0) refuse(Fault::kMessage, message.site, name + " after ncclCommDestroy");
  if (!comm.is_ready)
    refuse(Fault::kMessage, message.site,
           name + ": the communicator was made within this group, and is ready after ncclGroupEnd");
  if (message.peer < 0 || message.peer >= comm.ranks)
    refuse(Fault::kMessage, message.site,
           name + ": rank " + std::to_string(message.peer) + " of " + std::to_string(comm.ranks));
  if (!stream)
    refuse(Fault::kMessage, message.site,
           name + ": no stream, and the emulator has no default stream");
  if (stream->device != comm.rank)
    refuse(Fault::kMessage, message.site,
           name + ": the communicator is " + device_name(comm.rank) + "'s, and the stream is " +
               device_name(stream->device) + "'s");
  if (comm.stream && comm.stream != stream)
    refuse(
        Fault::kMessage, message.site,
        name +
            ": the communicator has another stream, and the emulator accepts one stream for each");
  // One thread that has several ranks: it would wait for ranks that it has yet to call for.
  if (devices.groups == 0 && comm.ranks > 1)
    refuse(Fault::kDeadlock, message.site,
           name + " of rank " + std::to_string(comm.rank) +
               " outside of a group waits for the ranks that this thread has not called for yet: "
               "ncclGroupStart");
  comm.stream = stream;
  const std::size_t ranks =
      message.kind == Message::kGather ? static_cast<std::size_t>(comm.ranks) : 1;
  if (message.kind != Message::kReceive)
    check_bytes(message.from, message.bytes(), comm.rank, message.name(), message.site);
  if (message.kind != Message::kSend)
    check_bytes(message.to, ranks * message.bytes(), comm.rank, message.name(), message.site);
  if (message.kind == Message::kGather) {
    const std::byte *const own = message.to + comm.rank * message.bytes();
    if (message.from != own && message.from < message.to + ranks * message.bytes() &&
        message.to < message.from + message.bytes())
      refuse(Fault::kMessage, message.site,
             name + ": rank " + std::to_string(comm.rank) +
                 "'s part lies in the gathered parts, and not at its own place there");
    message.gather = comm.gathers++;
  }
  ncclGroupStart(where);
  devices.called.emplace_back(stream, message);
  ncclGroupEnd(where);
}

}  // namespace

ncclResult_t ncclSend(const void *from, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream, Where where) {
  call({.kind = Message::kSend,
        .comm = comm,
        .from = static_cast<const std::byte *>(from),
        .count = count,
        .type = type,
        .peer = peer},
       stream, where);
  return ncclSuccess;
}

ncclResult_t ncclRecv(void *to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream, Where where) {
  call({.kind = Message::kReceive,
        .comm = comm,
        .to = static_cast<std::byte *>(to),
        .count = count,
        .type = type,
        .peer = peer},
       stream, where);
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *from, void *to, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream, Where where) {
  call({.kind = Message::kGather,
        .comm = comm,
        .from = static_cast<const std::byte *>(from),
        .to = static_cast<std::byte *>(to),
        .count = count,
        .type = type},
       stream, where);
  return ncclSuccess;
}

}  // namespace api
}  // namespace emulator

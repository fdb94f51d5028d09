// Streams: which work on the device is known to come after which, and who used each piece of memory last.
//
// Every kernel is done when its launch returns. What a GPU would be free to reorder is found by vector clocks: each
// stream and event, and the host, know how many launches of every stream come before them (Lamport's happened-before).
#include "device.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace simcuda {
namespace streams {
namespace {

struct Use {
  const char *begin, *end;
  c10::StreamId stream;
  uint64_t time;  // of the stream: this is its launch number `time`
  bool writes;
  const std::string* what;
};

struct Memory {
  c10::StreamId owner;  // the stream it was allocated on, to which it goes back
  std::vector<Use> uses;
  std::set<c10::StreamId> recorded;  // by `record_stream`
};

constexpr c10::StreamId kUnknown = -1;

thread_local c10::StreamId current_stream = 0;
c10::StreamId last_stream = 0;

std::mutex mutex;  // of all that follows
bool checks_order = false, checks_freed = false;
std::vector<Clock> clocks(1);  // by stream
Clock host;
std::unordered_map<const void*, Memory> memory;  // by its first byte
std::unordered_map<c10::StreamId, std::vector<Use>> freed;  // by owner: uses that it is not known to come after
std::unordered_set<std::string> names;

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t stream = 0; stream < from.size(); ++stream) into[stream] = std::max(into[stream], from[stream]);
}

bool comes_after(const Clock& clock, const Use& use) {
  auto stream = static_cast<size_t>(use.stream);
  return stream < clock.size() && clock[stream] >= use.time;
}

// What the next launch on a stream comes after.
Clock& clock_of(c10::StreamId stream) {
  auto index = static_cast<size_t>(stream);
  if (clocks.size() <= index) clocks.resize(index + 1);
  auto& clock = clocks[index];
  if (clock.size() <= index) clock.resize(index + 1);
  merge(clock, host);
  return clock;
}

const std::string* name_of(const std::string& what) { return &*names.insert(what).first; }

// From the first byte to behind the last one of a tensor.
std::pair<const char*, const char*> bytes_of(const at::Tensor& tensor) {
  auto* first = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return {first, first};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {first, first + (last + 1) * static_cast<int64_t>(tensor.itemsize())};
}

std::string refusal_of(const Use& earlier, const Use& now) {
  std::ostringstream text;
  text << *now.what << " on stream " << now.stream << (now.writes ? " writes" : " reads") << " memory that "
       << *earlier.what << " on stream " << earlier.stream << (earlier.writes ? " writes" : " reads")
       << ", and no event orders the two; use wait_stream or wait_event";
  return text.str();
}

// Empty, or why a use is refused. What it supersedes is forgotten: who comes after it comes after that too.
std::string note(const void* base, const Use& now) {
  auto found = memory.try_emplace(base, Memory{kUnknown, {}, {}}).first;  // from before the rule was on
  const auto& clock = clocks[static_cast<size_t>(now.stream)];
  auto& uses = found->second.uses;
  for (const auto& use : uses) {
    bool conflicts = (use.writes || now.writes) && use.begin < now.end && now.begin < use.end;
    if (checks_order && conflicts && !comes_after(clock, use)) return refusal_of(use, now);
  }
  auto is_superseded = [&](const Use& use) {
    bool inside = now.begin <= use.begin && use.end <= now.end;
    return inside && (now.writes || (!use.writes && use.stream == now.stream));
  };
  uses.erase(std::remove_if(uses.begin(), uses.end(), is_superseded), uses.end());
  uses.push_back(now);
  return "";
}

void refuse(const std::string& refusal) {
  if (!refusal.empty()) report_race(refusal);
}

}  // namespace

c10::StreamId current() { return current_stream; }
void set_current(c10::StreamId stream) { current_stream = stream; }

c10::StreamId create() {
  std::lock_guard<std::mutex> lock(mutex);
  return ++last_stream;
}

Clock record(c10::StreamId stream) {
  std::lock_guard<std::mutex> lock(mutex);
  return clock_of(stream);
}

void wait(c10::StreamId stream, const Clock& event) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(clock_of(stream), event);
}

void host_waits(const Clock& event) {
  std::lock_guard<std::mutex> lock(mutex);
  merge(host, event);
}

void host_waits_for_all() {
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& clock : clocks) merge(host, clock);
}

void check(bool order, bool freed_memory) {
  std::lock_guard<std::mutex> lock(mutex);
  checks_order = order, checks_freed = freed_memory;
  memory.clear();
  freed.clear();
}

bool are_checked() { return checks_order || checks_freed; }

Launch::Launch(const std::string& what, c10::StreamId stream) : what_(what), stream_(stream) {
  std::lock_guard<std::mutex> lock(mutex);
  time_ = ++clock_of(stream)[static_cast<size_t>(stream)];
}

void Launch::use(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0) return;
  std::string refusal;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto [begin, end] = bytes_of(tensor);
    refusal = note(tensor.storage().data(), {begin, end, stream_, time_, writes, name_of(what_)});
  }
  refuse(refusal);
}

void allocated(const void* data, size_t bytes, const std::string& what) {
  if (!are_checked() || data == nullptr) return;
  std::string refusal;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto owner = current_stream;
    const auto& clock = clock_of(owner);
    auto* begin = static_cast<const char*>(data);
    Use first{begin, begin + bytes, owner, clock[static_cast<size_t>(owner)], true, name_of(what)};
    memory[data] = Memory{owner, {first}, {}};
    for (const auto& use : freed[owner])
      if (!comes_after(clock, use)) {
        std::ostringstream text;
        text << "memory of stream " << owner << " was freed and is given out again while " << *use.what << " on stream "
             << use.stream << " may still use it; use record_stream, or let stream " << owner << " wait before it is freed";
        refusal = text.str();
      }
    freed[owner].clear();
  }
  refuse(refusal);
}

void released(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = memory.find(data);
  if (found == memory.end()) return;
  const auto& [owner, uses, recorded] = found->second;
  bool is_checked = checks_freed && owner != kUnknown;
  for (const auto& use : uses)
    if (is_checked && use.stream != owner && !recorded.count(use.stream) && !comes_after(clock_of(owner), use))
      freed[owner].push_back(use);
  memory.erase(found);
}

void record_stream(const void* data, c10::StreamId stream) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = memory.find(data);
  if (found != memory.end()) found->second.recorded.insert(stream);
}

}  // namespace streams
}  // namespace simcuda

// The device itself: memory, pinned memory, events, random numbers, and the hooks by which torch finds it.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <unordered_set>

namespace simcuda {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kPoison = 0xFF;  // NaN in every floating dtype, -1 in integers
const std::string kAllocation = "its allocation";

std::atomic<int> chosen{0}, visible{1};  // devices

void* allocate_poisoned(size_t bytes) {
  size_t room = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, room);
  TORCH_CHECK(data != nullptr, "out of memory: the simulated device cannot allocate ", bytes, " bytes");
  return std::memset(data, kPoison, room);
}

// ----- memory of the device -----

std::atomic<int64_t> allocated{0}, peak{0};

struct Block {
  void* data;
  size_t bytes;
};

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device()};
    auto* block = new Block{allocate_poisoned(bytes), bytes};
    acquire(bytes);
    c10::DataPtr data{block->data, block, &DeviceMemory::free, device()};
    streams::allocated(block->data, bytes, kAllocation);
    return data;
  }
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    release(block->bytes);
    streams::released(block->data);
    std::free(block->data);
    delete block;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_memory);

// ----- pinned memory -----

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // start -> bytes

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* data = allocate_poisoned(bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(data)] = bytes;
    return {data, data, &PinnedMemory::free, c10::Device(c10::DeviceType::CPU)};
  }
  static void free(void* data) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(static_cast<char*>(data));
    std::free(data);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_memory;
at::HostAllocatorRegistry<c10::DeviceType::CUDA> pinned_registration(&pinned_memory);

struct Arrival {
  at::Tensor pinned, data;
};
std::vector<Arrival> arrivals;  // under pinned_mutex
std::atomic<bool> copies_are_late{true};

void report_wait(const std::string& what);
void synchronize();

void deliver() {
  std::vector<Arrival> due;
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    due.swap(arrivals);
  }
  for (auto& arrival : due) arrival.pinned.copy_(arrival.data);
}

// ----- streams and events -----

struct Event {
  std::chrono::steady_clock::time_point time;
  streams::Clock clock;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(visible); }

  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, simcuda::device(), id); }
  c10::Stream getStream(c10::Device) const override { return stream(streams::current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(streams::create()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(streams::create()); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto previous = stream(streams::current());
    streams::set_current(next.id());
    return previous;
  }
  bool queryStream(const c10::Stream& asked) const override {
    streams::host_waits(streams::record(asked.id()));
    return true;
  }
  void synchronizeStream(const c10::Stream& waited) const override {
    report_wait("stream.synchronize");
    streams::host_waits(streams::record(waited.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize(); }

  void record(void** event, const c10::Stream& here, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), streams::record(here.id())};
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event != nullptr) streams::wait(waiting.id(), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) streams::host_waits(static_cast<Event*>(event)->clock);
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    report_wait("event.synchronize");
    if (event != nullptr) streams::host_waits(static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto span = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    streams::record_stream(data.get(), stream.id());
  }
};
c10::impl::DeviceGuardImplRegistrar guard_registration(c10::DeviceType::CUDA, new Guard());

// ----- random numbers: a CPU generator of the device's own -----

struct DeviceGenerator final : c10::GeneratorImpl {
  DeviceGenerator()
      : GeneratorImpl(simcuda::device(), c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator();
    copy->host = host.clone();
    return copy;
  }
  at::Generator host;
};

at::Generator& default_generator() {
  static at::Generator generator(c10::make_intrusive<DeviceGenerator>());
  return generator;
}

// ----- how torch finds the device -----

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return visible; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(visible); }
  c10::DeviceIndex current_device() const override { return device().index(); }
  c10::DeviceIndex getCurrentDevice() const override { return device().index(); }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return device().index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return device().index(); }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    static std::atomic<bool> gave_default{false};  // the first one is the default, for torch.cuda.default_generators
    if (!gave_default.exchange(true)) return default_generator();
    return at::Generator(c10::make_intrusive<DeviceGenerator>());
  }
  void deviceSynchronize(c10::DeviceIndex) const override { synchronize(); }
};
// torch makes its hooks at the first question and keeps them, and something has asked before this library came: the
// object that it keeps becomes one of ours. Neither class has members.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
const auto* hooks = new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks({});

// ----- the observer in Python -----

// Returns 0, or 1 after it left a message by `simcuda_refuse`.
using Observer = int (*)(const char* kind, const char* what);
std::atomic<Observer> observer{nullptr};
std::atomic<int> kernels_observed{0};  // 0: none, 1: the first launch of each kernel, 2: every launch
std::mutex kernels_mutex;
std::unordered_set<std::string> launched;  // under kernels_mutex
thread_local std::string refusal;

void observe(const char* kind, const std::string& what) {
  if (auto tell = observer.load()) TORCH_CHECK(tell(kind, what.c_str()) == 0, refusal);
}

// The host waits, for what the caller says.
void report_wait(const std::string& what) {
  observe("sync", what);
  deliver();
}

void synchronize() {
  report_wait("device synchronize");
  streams::host_waits_for_all();
}

}  // namespace

c10::Device device() { return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(chosen)); }

c10::Allocator* memory() { return &device_memory; }

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory, keys, dtype);
}

void acquire(size_t bytes) {
  int64_t now = allocated += static_cast<int64_t>(bytes);
  for (int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {}
}

void release(size_t bytes) { allocated -= static_cast<int64_t>(bytes); }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < start + bytes;
}

void copy_later(const at::Tensor& pinned, const at::Tensor& data) {
  if (!copies_are_late || !pinned.is_contiguous()) {
    pinned.copy_(data);
    return;
  }
  auto kept = data.clone();
  std::memset(pinned.data_ptr(), pinned.scalar_type() == at::kBool ? 1 : kPoison, pinned.nbytes());
  std::lock_guard<std::mutex> lock(pinned_mutex);
  arrivals.push_back({pinned, kept});
}

void report_sync(const std::string& what) {
  report_wait(what);
  streams::host_waits(streams::record(streams::current()));
}

void report_race(const std::string& what) { observe("race", what); }

bool observes_kernels() { return kernels_observed != 0; }

void report_kernel(const std::string& name) {
  if (kernels_observed == 1) {
    std::lock_guard<std::mutex> lock(kernels_mutex);
    if (!launched.insert(name).second) return;
  }
  observe("kernel", name);
}

at::Generator& host_generator() { return static_cast<DeviceGenerator*>(default_generator().unsafeGetGeneratorImpl())->host; }

at::Generator host_generator_of(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

}  // namespace simcuda

// ----- what Python calls -----

extern "C" {
void simcuda_observe(simcuda::Observer observer) { simcuda::observer = observer; }
void simcuda_refuse(const char* message) { simcuda::refusal = message; }
void simcuda_observe_kernels(int which) {
  std::lock_guard<std::mutex> lock(simcuda::kernels_mutex);
  simcuda::kernels_observed = which;
  simcuda::launched.clear();
}
void simcuda_delay_copies(int late) { simcuda::copies_are_late = late != 0; }
void simcuda_synchronize() { simcuda::synchronize(); }
void simcuda_check_streams(int order, int freed) { simcuda::streams::check(order != 0, freed != 0); }
void simcuda_show_devices(int count) { simcuda::visible = count; }
void simcuda_set_device(int index) { simcuda::chosen = index; }
int simcuda_current_device() { return simcuda::chosen; }
int64_t simcuda_allocated() { return simcuda::allocated; }
int64_t simcuda_peak() { return simcuda::peak; }
void simcuda_reset_peak() { simcuda::peak = simcuda::allocated.load(); }
int64_t simcuda_current_stream() { return simcuda::streams::current(); }
void simcuda_set_stream(int64_t id) { simcuda::streams::set_current(id); }
void simcuda_poison(void* data, size_t bytes, int is_bool) { std::memset(data, is_bool ? 1 : simcuda::kPoison, bytes); }
uint64_t simcuda_checksum(const void* data, size_t bytes) {
  uint64_t sum = 14695981039346656037ull;
  auto* byte = static_cast<const unsigned char*>(data);
  for (; bytes >= 8; bytes -= 8, byte += 8) {
    uint64_t word;
    std::memcpy(&word, byte, 8);
    sum = (sum ^ word) * 1099511628211ull;
    sum ^= sum >> 29;
  }
  for (; bytes > 0; --bytes, ++byte) sum = (sum ^ *byte) * 1099511628211ull;
  return sum;
}
}

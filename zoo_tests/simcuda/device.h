// What the parts of the simulated device share: device.cpp (memory, random numbers, hooks), streams.cpp, operators.cpp.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

namespace simcuda {

// The one device that this process uses of those that it sees: `cuda:0`, or what `torch.cuda.set_device` chose.
c10::Device device();

c10::Allocator* memory();
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

// Counts `bytes` that an operator's result occupies until `release`.
void acquire(size_t bytes);
void release(size_t bytes);

bool is_pinned(const void* data);
// A copy to pinned memory that does not block: the data arrives at the next synchronisation, poison until then.
void copy_later(const at::Tensor& pinned, const at::Tensor& data);

// Tells the observer in Python, which may refuse: then this throws.
void report_sync(const std::string& what);     // the host waits for the current stream
void report_kernel(const std::string& name);   // a kernel is launched
void report_race(const std::string& what);     // two streams use the same memory in no order
bool observes_kernels();

// The CPU generator that holds the state of the device's random numbers.
at::Generator& host_generator();
at::Generator host_generator_of(const at::Generator& device_generator);

// ----- streams.cpp -----

namespace streams {

using Clock = std::vector<uint64_t>;  // by stream: how many of its launches come before

c10::StreamId current();
void set_current(c10::StreamId stream);
c10::StreamId create();

Clock record(c10::StreamId stream);                   // what an event recorded now comes after
void wait(c10::StreamId stream, const Clock& event);  // the stream waits for the event
void host_waits(const Clock& event);
void host_waits_for_all();

// Which rules are on; forgets who used memory.
void check(bool order, bool freed_memory);
bool are_checked();

// One launch on a stream, whose uses of memory are refused where no event orders them after those of other streams.
class Launch {
 public:
  Launch(const std::string& what, c10::StreamId stream);
  void use(const at::Tensor& tensor, bool writes);

 private:
  const std::string& what_;
  c10::StreamId stream_;
  uint64_t time_;
};

// Memory that is given out on the current stream, first written by `what`; that goes back; that a stream was recorded for.
void allocated(const void* data, size_t bytes, const std::string& what);
void released(const void* data);
void record_stream(const void* data, c10::StreamId stream);

}  // namespace streams

}  // namespace simcuda

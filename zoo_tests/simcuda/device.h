// What the two halves of the simulated device share: device.cpp (memory, streams, random numbers), operators.cpp.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <string>

namespace simcuda {

inline c10::Device device() { return c10::Device(c10::DeviceType::CUDA, 0); }

c10::Allocator* memory();
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);

// Counts `bytes` that an operator's result occupies until `release`.
void acquire(size_t bytes);
void release(size_t bytes);

bool is_pinned(const void* data);
// A copy to pinned memory that does not block: the data arrives at the next synchronisation, poison until then.
void copy_later(const at::Tensor& pinned, const at::Tensor& data);

// Tells the observer in Python, which may refuse: then this throws.
void report_sync(const std::string& what);     // the host waits for the device
void report_kernel(const std::string& name);   // a kernel is launched
bool observes_kernels();

// The CPU generator that holds the state of the device's random numbers.
at::Generator& host_generator();
at::Generator host_generator_of(const at::Generator& device_generator);

}  // namespace simcuda

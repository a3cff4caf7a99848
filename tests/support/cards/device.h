// What the pretended device and the pretended NCCL share.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Device.h>
#include <functional>
#include <string>

namespace cards {

// Returns a tensor on the same memory that says that it lies on `device`.
at::Tensor alias(const at::Tensor& x, c10::Device device);
inline at::Tensor on_host(const at::Tensor& x) { return alias(x, c10::Device(c10::DeviceType::CPU)); }

// Reports something that a spy may count. `elements` is the size of a copy, or 0.
void report(const std::string& event, int64_t elements);

// Runs the copies that a blocking wait of the host for the device would find done.
void finish_copies();

// Returns only when the device answers: not while a collective hangs on it. Throws if its communicator was aborted.
void wait_for_device();

// A collective will never end on the device: the next wait of the host blocks, as long as `aborted()` is false.
void set_stuck(std::function<bool()> aborted);
bool is_stuck();

}  // namespace cards

// A device of type CUDA whose memory is the host's, for a torch that was built without CUDA.
//
// Its tensors are plain tensors with real values. An operator without a kernel below runs the CPU's kernel on an alias
// of the memory. So autograd runs nodes of such tensors in its device threads, tensors on two devices are CUDA's error,
// and everything that would make the host wait for the device is reported.
//
// NOTE [Late copies]
// `cpu.copy_(cuda, non_blocking=True)` into pinned memory returns before the bytes are there. Here they are written when
// an event or a blocking wait says that they have arrived; until then the memory has NaN (or -1). So code that reads too
// early gets wrong numbers, as on a card, but always.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace cards {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int MOST_DEVICES = 16;
int device_count = 8;
thread_local DeviceIndex current = 0;

Device here(c10::optional<Device> device) {
  return device && device->has_index() ? *device : Device(DeviceType::CUDA, current);
}

// ---- memory

std::atomic<int64_t> live_bytes{0}, peak_bytes{0};
std::mutex memory_mutex;
std::map<void*, int64_t>& device_blocks() {
  static std::map<void*, int64_t> blocks;
  return blocks;
}
std::map<void*, int64_t>& pinned_blocks() {
  static std::map<void*, int64_t> blocks;
  return blocks;
}
std::vector<int64_t> pinned_requests;  // Bytes of each request for pinned memory.

void release(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto block = device_blocks().find(pointer);
    if (block != device_blocks().end()) {
      live_bytes -= block->second;
      device_blocks().erase(block);
    }
  }
  c10::GetCPUAllocator()->raw_deallocate(pointer);
}

struct DeviceAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? c10::GetCPUAllocator()->raw_allocate(bytes) : nullptr;
    if (pointer) {
      std::lock_guard<std::mutex> lock(memory_mutex);
      device_blocks()[pointer] = static_cast<int64_t>(bytes);
      live_bytes += static_cast<int64_t>(bytes);
      if (live_bytes > peak_bytes) peak_bytes = live_bytes.load();
    }
    return {pointer, pointer, &release, Device(DeviceType::CUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

void release_pinned(void* pointer) {
  {
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned_blocks().erase(pointer);
  }
  c10::GetCPUAllocator()->raw_deallocate(pointer);
}

struct PinnedAllocator final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> lock(memory_mutex);
    pinned_blocks()[pointer] = static_cast<int64_t>(bytes);
    pinned_requests.push_back(static_cast<int64_t>(bytes));
    return {pointer, pointer, &release_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
bool allocator_is_set = (c10::SetAllocator(DeviceType::CUDA, &device_allocator, 100), true);

bool is_pinned(const at::Tensor& x) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return x.has_storage() && pinned_blocks().count(const_cast<void*>(x.storage().data())) > 0;
}

// ---- streams: there is one, and everything has run when a call returns

struct DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device(); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

// ---- random numbers: each device has a stream of its own

struct DeviceGenerator : public c10::GeneratorImpl {
  at::Generator numbers = at::make_generator<at::CPUGeneratorImpl>(67280421310721ULL);
  explicit DeviceGenerator(DeviceIndex index)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, index), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    report("seed of a generator", 0);
    numbers.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    report("state of a generator", 0);
    numbers.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->numbers = numbers.clone();
    return copy;
  }
};

at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MOST_DEVICES; ++i) made.emplace_back(c10::make_intrusive<DeviceGenerator>(i));
    return made;
  }();
  return generators.at(index < 0 ? current : index);
}

at::Generator numbers_of(at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->numbers;
}

struct Hooks : public at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return pinned_blocks().count(const_cast<void*>(data)) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex index = -1) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index = -1) const override {
    return at::Generator(c10::make_intrusive<DeviceGenerator>(index < 0 ? current : index));
  }
};

// `import torch` has made the object that says "no CUDA", and keeps a reference to it. So it gets our functions.
bool hooks_are_set = [] {
  static Hooks hooks;
  auto* torch_hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(torch_hooks) = *reinterpret_cast<void**>(&hooks);
  return true;
}();

// ---- what is reported

PyObject* spy = nullptr;
std::atomic<bool> spying{false};

// ---- copies that arrive late

struct LateCopy {
  at::Tensor target, values;
  int64_t number;
};
std::mutex copies_mutex;
std::vector<LateCopy> late_copies;
int64_t copies_begun = 0;

void finish_copies_until(int64_t number) {
  std::lock_guard<std::mutex> lock(copies_mutex);
  at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<LateCopy> rest;
  for (auto& copy : late_copies) {
    if (copy.number <= number) copy.target.copy_(copy.values);
    else rest.push_back(copy);
  }
  late_copies.swap(rest);
}

// Returns the number of the last copy that was begun: an event waits for it.
int64_t last_copy() {
  std::lock_guard<std::mutex> lock(copies_mutex);
  return copies_begun;
}

void poison(at::Tensor& x) {
  if (at::isFloatingType(x.scalar_type()) || at::isComplexType(x.scalar_type())) x.fill_(NAN);
  else if (x.scalar_type() != at::kBool) x.fill_(x.scalar_type() == at::kByte ? 255 : -1);
}

void copy_late(at::Tensor& target, const at::Tensor& source) {
  std::lock_guard<std::mutex> lock(copies_mutex);
  // A view that conjugates or negates: the bytes that arrive are those of the memory behind it. CUDA's copy then changes
  // the sign in the target at once, which the bytes overwrite.
  at::Tensor stored = source.is_conj() ? source.conj() : source;
  if (stored.is_neg()) stored = stored._neg_view();
  late_copies.push_back({target, stored.clone(), ++copies_begun});
  poison(target);
}

// Copies between host and device, both given as tensors of the host; reports what the host waits for.
void transfer(at::Tensor target, const at::Tensor& source, bool to_device, bool to_host, bool non_blocking,
              bool pinned) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t elements = source.numel();
  if (to_device) report(non_blocking ? (pinned ? "async copy to the device" : "pageable copy to the device")
                                     : "copy to the device", elements);
  if (to_host) report(non_blocking ? (pinned ? "async copy to the host" : "pageable copy to the host")
                                   : "copy to the host", elements);
  if (to_host && non_blocking && pinned) return copy_late(target, source);
  if (to_host) wait_for_device();
  target.copy_(source);
}

// ---- operators

// These make the host wait for the device inside of their CUDA kernels.
const std::set<std::string> WAITS = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::_unique", "aten::equal", "aten::is_nonzero", "aten::repeat_interleave", "aten::bincount", "aten::histc",
    "aten::_linalg_check_errors"};
// These take tensors of the host beside those of the device.
const std::set<std::string> MIXED = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::copy_", "aten::_copy_from",
    "aten::set_", "aten::_to_copy", "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::lift_fresh", "aten::lift"};

// The call of one operator on tensors of the device, run by the CPU's kernel.
struct HostCall {
  const c10::FunctionSchema& schema;
  c10::optional<Device> device;
  bool has_host_tensor = false, has_mask = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;  // of the host, of the device

  at::Tensor lowered(const at::Tensor& x) {
    if (!x.defined()) return x;
    if (!x.is_cuda()) {
      has_host_tensor |= x.dim() > 0 && x.device().is_cpu();
      return x;
    }
    TORCH_CHECK(!device || !device->has_index() || x.dim() == 0 || *device == x.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", x.device(), "! (", schema.name(), ")");
    device = x.device();
    for (auto& [host, original] : aliases)
      if (original.is_same(x)) return host;
    // An operator with out= may resize an empty tensor, so that one gets memory of its own; see `raised`.
    const bool empty = x.numel() == 0 && x.storage().nbytes() == 0;
    aliases.emplace_back(
        empty ? at::empty(x.sizes(), x.options().device(at::kCPU).requires_grad(false)) : on_host(x), x);
    return aliases.back().first;
  }

  void lower(c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      value = lowered(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& x : value.toTensorVector()) tensors.push_back(lowered(x));
      value = c10::IValue(c10::List<at::Tensor>(tensors));
    } else if (value.isOptionalTensorList()) {
      c10::List<c10::optional<at::Tensor>> tensors;
      for (c10::optional<at::Tensor> x : value.toOptionalTensorList()) {
        if (x && x->defined()) {
          has_mask |= x->scalar_type() == at::kBool || x->scalar_type() == at::kByte;
          x = lowered(*x);
        }
        tensors.push_back(x);
      }
      value = c10::IValue(tensors);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!device) device = value.toDevice();
      value = Device(DeviceType::CPU);
    } else if (value.isBool() && argument.name() == "pin_memory") {
      value = c10::IValue(false);
    }
  }

  void lower_generator(c10::IValue& value) {
    if (value.isNone()) {
      value = c10::IValue(numbers_of(default_generator(device->has_index() ? device->index() : current)));
      return;
    }
    auto generator = value.toGenerator();
    TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
    value = c10::IValue(numbers_of(generator));
  }

  at::Tensor raised(const at::Tensor& x) {
    if (!x.defined() || !x.device().is_cpu()) return x;
    for (auto& [host, original] : aliases) {
      if (!host.is_same(x)) continue;
      auto* impl = original.unsafeGetTensorImpl();
      if (x.numel() > 0 && x.storage().data() != original.storage().data())
        impl->set_storage_keep_dtype(adopted(x).storage());
      if (host.sizes() != original.sizes() || host.strides() != original.strides() || x.numel() > 0)
        impl->set_sizes_and_strides(x.sizes(), x.strides());
      return original;
    }
    for (auto& [host, original] : aliases) {
      const bool view = x.has_storage() && x.storage().data() && x.storage().data() == host.storage().data();
      if (view) return with_storage(x, c10::Storage(original.storage()));
    }
    return device ? adopted(x) : x;
  }

  static at::Tensor with_storage(const at::Tensor& x, c10::Storage storage) {
    auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), x.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
    out.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
    if (x.is_conj()) out._set_conj(true);
    if (x.is_neg()) out._set_neg(true);
    return out;
  }

  // Returns a result as a tensor of the device. Its bytes are copied, so that memory is counted and freed as a card's.
  at::Tensor adopted(const at::Tensor& x) {
    int64_t elements = x.numel() > 0;
    for (int64_t d = 0; d < x.dim() && elements; ++d) elements += (x.size(d) - 1) * x.stride(d);
    const size_t bytes = elements * x.element_size();
    const auto before = std::exchange(current, here(device).index());
    auto memory = device_allocator.allocate(bytes);
    current = before;
    if (bytes) std::memcpy(memory.get(), static_cast<const char*>(x.data_ptr()), bytes);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), &device_allocator, true);
    auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), x.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
    if (x.is_conj()) out._set_conj(true);
    if (x.is_neg()) out._set_neg(true);
    return out;
  }

  void raise(c10::IValue& value) {
    if (value.isTensor()) {
      value = raised(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& x : value.toTensorVector()) tensors.push_back(raised(x));
      value = c10::IValue(c10::List<at::Tensor>(tensors));
    }
  }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  HostCall call{schema};
  const auto first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) call.lower((*stack)[first + i], arguments[i]);
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].name() == "generator" && call.device) call.lower_generator((*stack)[first + i]);
  call.device = call.device ? c10::optional<Device>(here(call.device)) : call.device;
  TORCH_CHECK(!(call.has_host_tensor && call.device && !MIXED.count(schema.name())),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              call.device.value_or(Device("cpu")), " and cpu! (", schema.name(), ")");
  // `aten::index` has called `nonzero` for its mask by now.
  const bool has_mask = call.has_mask && schema.name() != "aten::index";
  if (WAITS.count(schema.name()) || has_mask) {
    report(schema.name() + (has_mask ? " with a mask" : ""), 0);
    wait_for_device();
  }
  if (call.has_host_tensor && call.device) report("copy to the device: an index of " + schema.name(), 0);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  const auto count = schema.returns().size();
  const auto begin = stack->size() - count;
  for (size_t i = 0; i < count; ++i) call.raise((*stack)[begin + i]);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// ---- operators that a device has of its own

struct OnDevice {  // A region in which memory is made on a device.
  DeviceIndex before;
  explicit OnDevice(Device device) : before(std::exchange(current, device.index())) {}
  ~OnDevice() { current = before; }
};

at::Tensor empty_memory(c10::SymIntArrayRef size, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                        c10::optional<Device> device, c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  OnDevice region(here(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, DispatchKeySet(DispatchKey::CUDA),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, c10::optional<at::ScalarType> dtype,
                         c10::optional<at::Layout>, c10::optional<Device> device, c10::optional<bool>) {
  OnDevice region(here(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      DispatchKeySet(DispatchKey::CUDA), dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

// Derivatives that are zero, of forward mode, have no memory.
at::Tensor zero_without_memory(c10::SymIntArrayRef size, c10::optional<at::ScalarType> dtype,
                               c10::optional<at::Layout>, c10::optional<Device> device, c10::optional<bool>) {
  at::native::ZeroTensorAllocator allocator(here(device));
  const auto keys = DispatchKeySet(DispatchKey::CUDA) | DispatchKeySet(DispatchKey::ZeroTensor);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, keys,
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), c10::nullopt);
}

at::Tensor host_side(const at::Tensor& x) { return x.is_cuda() ? on_host(x) : x; }

at::Tensor& copy_into(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const bool to_device = target.is_cuda() && !source.is_cuda(), to_host = !target.is_cuda() && source.is_cuda();
  transfer(host_side(target), host_side(source), to_device, to_host, non_blocking,
           is_pinned(to_host ? target : source));
  return target;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto out = target;
  copy_into(out, source, non_blocking);
  return target;
}

at::Tensor to_copy(const at::Tensor& x, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                   c10::optional<Device> device, c10::optional<bool>, bool non_blocking,
                   c10::optional<at::MemoryFormat> format) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto where = device.value_or(x.device());
  const auto source = host_side(x);
  const auto options = source.options().dtype(dtype.value_or(x.scalar_type())).requires_grad(false);
  const auto strides_of = at::empty_like(source, options, format.value_or(at::MemoryFormat::Preserve));
  if (where.is_cuda()) {
    auto out = at::empty_strided(strides_of.sizes(), strides_of.strides(), options.device(here(where)));
    transfer(on_host(out), source, !x.is_cuda(), false, non_blocking, is_pinned(x));
    return out;
  }
  if (!where.is_cpu()) return at::empty_strided(strides_of.sizes(), strides_of.strides(), options.device(where));
  // torch makes the target of `.to("cpu", non_blocking=True)` in pinned memory: its bytes arrive late.
  auto out = non_blocking ? at::empty_strided(strides_of.sizes(), strides_of.strides(), options.pinned_memory(true))
                          : strides_of;
  transfer(out, source, false, true, non_blocking, non_blocking);
  return out;
}

at::Scalar local_scalar(const at::Tensor& x) {
  report("item", 1);
  wait_for_device();
  return on_host(x).item();
}

void resize_bytes(c10::StorageImpl* storage, size_t bytes) {
  if (storage->nbytes() == bytes) return;
  OnDevice region(storage->device());
  auto memory = device_allocator.allocate(bytes);
  if (bytes) std::memcpy(memory.get(), storage->data(), std::min<size_t>(storage->nbytes(), bytes));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

const at::Tensor& resize(const at::Tensor& x, c10::SymIntArrayRef size, c10::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  int64_t elements = x.storage_offset();
  elements += std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<int64_t>());
  const size_t bytes = elements * x.element_size();
  if (x.storage().nbytes() < bytes) resize_bytes(x.storage().unsafeGetStorageImpl(), bytes);
  x.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return x;
}

at::Tensor& set_geometry(at::Tensor& x, const c10::Storage& storage, int64_t offset, at::IntArrayRef sizes,
                         at::IntArrayRef strides) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(0);
  impl->set_sizes_and_strides(sizes, strides);
  impl->set_storage_offset(offset);
  return x;
}

at::Tensor& set_storage(at::Tensor& x, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  return set_geometry(x, storage, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_whole_storage(at::Tensor& x, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / x.element_size());
  return set_geometry(x, storage, 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  return set_geometry(x, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor as_strided(const at::Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      c10::optional<c10::SymInt> offset) {
  auto start = offset ? c10::optional<int64_t>(offset->expect_int()) : c10::nullopt;
  return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}

at::Tensor view(const at::Tensor& x, c10::SymIntArrayRef sizes) {
  return at::native::view(x, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor& x, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor unfold(const at::Tensor& x, int64_t dim, int64_t size, int64_t step) {
  dim = at::maybe_wrap_dim(dim, x.dim(), true);
  auto sizes = x.sizes().vec(), strides = x.strides().vec();
  sizes.push_back(size);
  strides.push_back(strides[dim]);
  sizes[dim] = (sizes[dim] - size) / step + 1;
  strides[dim] *= step;
  return at::native::as_strided_tensorimpl(x, sizes, strides, c10::nullopt);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, c10::optional<bool> train) {
  if (train && !*train) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

// CUDA's takes integers, the CPU's does not.
at::Tensor histc(const at::Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  auto counts = on_host(x).to(at::kDouble).histc(bins, low, high).to(x.scalar_type());
  return counts.to(x.device(), /*non_blocking=*/true);
}

// Computes attention in plain operators, and reports which kernel a card would choose.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const c10::optional<at::Tensor>& mask, double dropout, bool causal, c10::optional<double> scale,
                     bool grouped) {
  c10::optional<at::Tensor> bias = mask;
  if (bias && bias->defined()) {
    TORCH_CHECK(bias->device() == query.device(), "attn_mask is on ", bias->device(), " and the query on ",
                query.device());
    if (bias->scalar_type() == at::kBool)
      bias = at::zeros_like(*bias, query.options().requires_grad(false))
                 .masked_fill(bias->logical_not(), -std::numeric_limits<double>::infinity());
  }
  // A capture asks for shapes, with tensors that no card has.
  if (!query.key_set().has(c10::DispatchKey::Python)) report(bias && bias->defined() ? "attention with a mask" : "attention that a flash kernel computes", 0);
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, causal, c10::nullopt, scale, grouped));
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zero_without_memory);
  m.impl("copy_", &copy_into);
  m.impl("_copy_from", &copy_from);
  m.impl("_to_copy", &to_copy);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("native_dropout", &native_dropout);
  m.impl("histc", &histc);
  m.impl("scaled_dot_product_attention", &attention);
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &attention); }

// ---- a device that does not answer

std::mutex stuck_mutex;
std::function<bool()> stuck_until;

}  // namespace

at::Tensor alias(const at::Tensor& x, Device device) {
  auto storage = x.storage();
  auto* keep = new c10::Storage(storage);
  c10::DataPtr memory(const_cast<void*>(storage.data()), keep,
                      [](void* kept) { delete static_cast<c10::Storage*>(kept); }, device);
  c10::Storage shared(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), nullptr, false);
  DispatchKeySet keys(device.is_cpu() ? DispatchKey::CPU : DispatchKey::CUDA);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(shared), keys, x.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides());
  impl->set_storage_offset(x.storage_offset());
  if (x.is_conj()) out._set_conj(true);
  if (x.is_neg()) out._set_neg(true);
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}

void report(const std::string& event, int64_t elements) {
  if (!spying || spy == nullptr) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(py::handle(spy))(event, elements);
}

void finish_copies() { finish_copies_until(std::numeric_limits<int64_t>::max()); }

void set_stuck(std::function<bool()> aborted) {
  std::lock_guard<std::mutex> lock(stuck_mutex);
  if (!stuck_until) stuck_until = std::move(aborted);
}

bool is_stuck() {
  std::lock_guard<std::mutex> lock(stuck_mutex);
  return static_cast<bool>(stuck_until);
}

void wait_until_it_answers() {
  std::function<bool()> aborted;
  {
    std::lock_guard<std::mutex> lock(stuck_mutex);
    aborted = stuck_until;
  }
  if (aborted) {
    // A thread that holds the GIL would stop all others here; a card's wait does not hold it.
    std::unique_ptr<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil = std::make_unique<py::gil_scoped_release>();
    while (!aborted()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::lock_guard<std::mutex> lock(stuck_mutex);
    stuck_until = nullptr;
  }
}

void wait_for_device() {
  wait_until_it_answers();
  finish_copies();
}

void bind_device(py::module_& m) {
  m.def("set_device_count", [](int count) { device_count = std::min(count, MOST_DEVICES); });
  m.def("device_count", [] { return device_count; });
  m.def("set_device", [](int index) { current = static_cast<DeviceIndex>(index); });
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("live_bytes", [] { return live_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = live_bytes.load(); });
  m.def("set_spy", [](py::object function) { spy = function.release().ptr(); });
  m.def("set_spying", [](bool on) { spying = on; });
  m.def("last_copy", &last_copy);
  m.def("finish_copies_until", &finish_copies_until);
  m.def("wait_for_device", &wait_for_device);
  m.def("wait_until_it_answers", &wait_until_it_answers);
  m.def("is_stuck", &is_stuck);
  m.def("live_pinned_bytes", [] {
    std::lock_guard<std::mutex> lock(memory_mutex);
    int64_t bytes = 0;
    for (auto& block : pinned_blocks()) bytes += block.second;
    return bytes;
  });
  m.def("pinned_requests", [] {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return pinned_requests;
  });
  m.def("is_pinned", &is_pinned);
  m.def("pin", [](const at::Tensor& x) {
    auto out = at::empty_strided(x.sizes(), x.strides(), x.options().pinned_memory(true).requires_grad(false));
    at::AutoDispatchBelowADInplaceOrView guard;
    return out.copy_(x);
  });
  // A storage reaches C++ within a tensor of its bytes.
  m.def("resize_storage", [](const at::Tensor& bytes, int64_t count) {
    resize_bytes(bytes.storage().unsafeGetStorageImpl(), count);
  });
}

}  // namespace cards

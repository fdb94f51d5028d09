// The operators of the device: the CPU's kernels on the same memory, behind one fallback for all of them.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_set>

namespace simcuda {
namespace {

using Stack = torch::jit::Stack;
const c10::Device kHost(c10::DeviceType::CPU);

// A CPU tensor with the same memory, sizes, strides and offset.
at::Tensor host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(owner->mutable_data(), owner, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, kHost);
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), owner->nbytes(), std::move(data), nullptr, false));
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

// A tensor of the device that takes over the memory of a CPU tensor, which the operator `name` made.
at::Tensor on_device(const at::Tensor& tensor, const std::string& name) {
  struct Kept {
    at::Tensor tensor;
    size_t bytes;
  };
  auto* kept = new Kept{tensor, tensor.storage().nbytes()};
  acquire(kept->bytes);
  auto free = [](void* context) {
    auto* kept = static_cast<Kept*>(context);
    release(kept->bytes);
    streams::released(kept->tensor.storage().data());
    delete kept;
  };
  c10::DataPtr data(tensor.storage().mutable_data(), kept, free, device());
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), kept->bytes, std::move(data), memory(), true));
  auto moved = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  moved.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  streams::allocated(tensor.storage().data(), kept->bytes, name);
  return moved;
}

// ----- the fallback -----

// Operators whose CUDA kernel waits for the device, because the size of the result depends on the data.
const std::unordered_set<std::string> kSynchronising = {
    "aten::nonzero", "aten::masked_select", "aten::bincount", "aten::equal", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::is_nonzero"};
// Operators that take indices on either device.
const std::unordered_set<std::string> kIndexing = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index"};

bool is_fused_optimizer(const std::string& name) {
  return name.rfind("aten::_fused_", 0) == 0 || name.rfind("aten::_amp_", 0) == 0;
}

thread_local bool inside_torch_fallback = false;

// Operators that are given no generator draw from the CPU's own: it is lent the state of the device's meanwhile.
template <typename Run>
void drawing_from_device(const c10::OperatorHandle& op, bool gave_generator, const Run& run) {
  if (gave_generator || !op.hasTag(at::Tag::nondeterministic_seeded)) return run();
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  auto generator = at::detail::getDefaultCPUGenerator();
  auto outer = generator.get_state();
  generator.set_state(host_generator().get_state());
  run();
  host_generator().set_state(generator.get_state());
  generator.set_state(outer);
}

// The arguments of a call: their originals, and the CPU tensors that stand for them.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack) : op_(op), name_(op.schema().name()) {
    auto count = op.schema().arguments().size();
    arguments_.assign(stack.end() - static_cast<long>(count), stack.end());
    torch::jit::drop(stack, count);
  }

  void run(Stack& stack) {
    check();
    if (observes_kernels()) report_kernel(name_ + dtype_name());
    if (streams::are_checked() && !is_view()) use_memory();
    if (kSynchronising.count(name_)) report_sync(name_);
    auto originals = arguments_;
    for (auto& argument : arguments_) argument = to_host(argument);
    Stack results = arguments_;
    try {
      redispatch(results);
    } catch (const c10::Error& error) {
      std::string message = error.what_without_backtrace();  // to name the frames takes 10 ms
      auto says = [&](const char* text) { return message.find(text) != std::string::npos; };
      if (says("not resizable")) return run_on_copies(originals, stack);
      if (!says("not implemented for")) throw;
      results = in_wider_dtype();
    }
    for (const auto& result : results) stack.push_back(to_device(result));
  }

 private:
  void redispatch(Stack& stack) {
    drawing_from_device(
        op_, gave_generator_, [&] { op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack); });
  }

  // A result that the caller provides and that must grow: torch's own fallback copies everything there and back.
  void run_on_copies(const Stack& originals, Stack& stack) {
    stack.insert(stack.end(), originals.begin(), originals.end());
    inside_torch_fallback = true;
    auto leave = c10::make_scope_exit([] { inside_torch_fallback = false; });
    drawing_from_device(op_, gave_generator_, [&] { at::native::cpu_fallback(op_, &stack); });
  }

  // What CUDA's kernels would refuse or wait for.
  void check() {
    bool any_device = false, any_host = false, mask = false;
    auto look = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      any_device |= tensor.is_cuda();
      any_host |= tensor.is_cpu() && (tensor.dim() > 0 || is_fused_optimizer(name_));
      mask |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    };
    for (size_t number = 0; number < arguments_.size(); ++number) {
      const auto& argument = arguments_[number];
      if (argument.isTensor()) {
        look(argument.toTensor());
      } else if (argument.isTensorList()) {
        for (const at::Tensor& tensor : argument.toTensorList()) look(tensor);
      } else if (argument.isOptionalTensorList()) {
        mask = false;
        for (const auto& tensor : argument.toOptionalTensorVector())
          if (tensor) look(*tensor);
        // A mask that is assigned one number fills, and needs no wait.
        bool fills = number + 1 < arguments_.size() && arguments_[number + 1].isTensor() &&
                     arguments_[number + 1].toTensor().numel() == 1;
        if (mask && !fills && kIndexing.count(name_)) report_sync(name_ + " with a mask");
      }
    }
    bool mixes = any_device && any_host && !kIndexing.count(name_);
    TORCH_CHECK(!mixes, "Expected all tensors to be on the same device, but ", name_, " got some on cuda:0 and some on cpu");
  }

  // Whether it reads nothing, and returns another view of an argument.
  bool is_view() const {
    const auto& returns = op_.schema().returns();
    return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& value) {
      return value.alias_info() != nullptr && !value.alias_info()->isWrite();
    });
  }

  void use_memory() const {
    streams::Launch launch(name_, streams::current());
    for (size_t number = 0; number < arguments_.size(); ++number) {
      const auto& argument = arguments_[number];
      const auto* alias = op_.schema().arguments()[number].alias_info();
      bool writes = alias != nullptr && alias->isWrite();
      if (argument.isTensor()) {
        launch.use(argument.toTensor(), writes);
      } else if (argument.isTensorList()) {
        for (const at::Tensor& tensor : argument.toTensorList()) launch.use(tensor, writes);
      } else if (argument.isOptionalTensorList()) {
        for (const auto& tensor : argument.toOptionalTensorVector())
          if (tensor) launch.use(*tensor, writes);
      }
    }
  }

  std::string dtype_name() const {
    for (const auto& argument : arguments_)
      if (argument.isTensor() && argument.toTensor().defined()) return std::string(" ") + toString(argument.toTensor().scalar_type());
    return "";
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    auto alias = host(tensor);
    if (tensor.defined() && tensor.is_cuda()) aliases_.emplace_back(alias, tensor);
    return alias;
  }

  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(to_host(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<at::Tensor>(to_host(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice()) return kHost;
    if (value.isGenerator() && value.toGenerator().defined()) {
      gave_generator_ = true;
      auto generator = value.toGenerator();
      return generator.device().is_cuda() ? host_generator_of(generator) : generator;
    }
    return value;
  }

  // An argument that is returned, a view of one, or memory of the result's own.
  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const auto& [alias, original] : aliases_)
      if (alias.is_same(result)) {
        auto* impl = original.unsafeGetTensorImpl();  // a kernel may have made it smaller
        if (original.sizes() != alias.sizes()) impl->set_sizes_and_strides(alias.sizes(), alias.strides());
        return original;
      }
    for (const auto& [alias, original] : aliases_)
      if (result.storage().data() != nullptr && result.storage().data() == alias.storage().data())
        return at::native::as_strided_tensorimpl(original, result.sizes(), result.strides(), result.storage_offset());
    return on_device(result, name_);
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(to_device(tensor));
      return list;
    }
    return value;
  }

  // Once more for what the CPU's kernel lacks: integers as float64, 16 bits as float32, and back.
  Stack in_wider_dtype() {
    std::vector<std::pair<at::Tensor, at::Tensor>> widened;  // (wide copy, original)
    at::ScalarType narrow = at::kFloat;
    auto widen = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      auto dtype = tensor.scalar_type();
      if (!at::isIntegralType(dtype, false) && !at::isReducedFloatingType(dtype)) return tensor;
      narrow = dtype;
      widened.emplace_back(tensor.to(at::isReducedFloatingType(dtype) ? at::kFloat : at::kDouble), tensor);
      return widened.back().first;
    };
    Stack stack;
    for (const auto& argument : arguments_) {
      if (argument.isTensor()) {
        stack.emplace_back(widen(argument.toTensor()));
      } else if (argument.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : argument.toTensorList()) list.push_back(widen(tensor));
        stack.emplace_back(list);
      } else {
        stack.push_back(argument);
      }
    }
    redispatch(stack);
    for (auto& result : stack) {
      if (!result.isTensor() || !result.toTensor().defined()) continue;
      auto wide = result.toTensor();
      auto same = std::find_if(widened.begin(), widened.end(), [&](auto& pair) { return pair.first.is_same(wide); });
      if (same != widened.end()) {
        result = same->second.copy_(wide);
      } else if (wide.scalar_type() == at::kDouble || wide.scalar_type() == at::kFloat) {
        result = wide.to(narrow);
      }
    }
    return stack;
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  Stack arguments_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;  // (CPU tensor, original)
  bool gave_generator_ = false;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, *stack).run(*stack); }

// ----- what has no CPU kernel to fall back on -----

void check_device(std::optional<c10::Device> asked) {
  bool is_other = asked && asked->is_cuda() && asked->has_index() && *asked != device();
  TORCH_CHECK(!is_other, "this process trains on ", device(), ", and a tensor is made on ", *asked);
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> asked, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_device(asked);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), memory(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_with_strides(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                              std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                              std::optional<c10::Device> asked, std::optional<bool>) {
  check_device(asked);
  return empty_strided(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(dtype));
}

// Copies to pageable memory block the host, whatever `non_blocking` says; those from it are staged by the driver.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  bool to_host = !self.is_cuda(), to_device = !source.is_cuda();
  bool crosses = (to_host || to_device) && !inside_torch_fallback;
  bool blocks = crosses && !(non_blocking && (to_device || is_pinned(self.const_data_ptr())));
  if (streams::are_checked()) {
    static const std::string name = "aten::copy_";
    streams::Launch launch(name, streams::current());
    launch.use(source, false);
    launch.use(self, true);
  }
  if (blocks) report_sync(to_host ? "copy to the host" : "copy to the device");
  if (observes_kernels() && !to_host && !to_device) report_kernel("aten::copy_");
  if (crosses && to_host && !blocks) {
    copy_later(self, host(source));
  } else {
    host(self).copy_(host(source));
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  auto written = target;
  copy_(written, self, non_blocking);
  return target;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  size_t bytes = (impl->numel() + impl->storage_offset()) * self.itemsize();
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    auto data = memory()->allocate(bytes);
    if (storage.nbytes() > 0) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  return self;
}

// For torch's own fallback: both copies are inside the device, so that nothing blocks.
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) resize_(target, self.sym_sizes(), {});
  host(target).copy_(host(self));
  return target;
}

void use(const at::Tensor& tensor, int64_t stream, bool writes, std::string_view what) {
  if (!streams::are_checked()) return;
  std::string name(what);
  streams::Launch(name, stream).use(tensor, writes);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  use(tensor, streams::current(), false, "item");
  report_sync("item");
  return at::_local_scalar_dense(host(tensor));
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, memory()->allocate(0), memory(), true));
  return self.set_(storage, 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) { streams::record_stream(self.storage().data(), stream.id()); }

}  // namespace
}  // namespace simcuda

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simcuda::fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(simcuda::empty));
  library.impl("empty_strided", TORCH_FN(simcuda::empty_with_strides));
  library.impl("copy_", TORCH_FN(simcuda::copy_));
  library.impl("_copy_from", TORCH_FN(simcuda::copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(simcuda::copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(simcuda::local_scalar));
  library.impl("resize_", TORCH_FN(simcuda::resize_));
  library.impl("record_stream", TORCH_FN(simcuda::record_stream));
  library.impl("set_", TORCH_FN(simcuda::set_nothing));
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  // As wholes: inside, torch picks kernels by the device, and those of a depthwise one are CUDA's alone.
  for (const char* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&simcuda::fallback>());
}

// For Python: a CPU tensor with the memory of a tensor of the device, and the use of one by a stream.
TORCH_LIBRARY(simcuda, library) {
  library.def("host(Tensor tensor) -> Tensor");
  library.impl("host", c10::DispatchKey::CUDA, TORCH_FN(simcuda::host));
  library.def("use(Tensor tensor, int stream, bool writes, str what) -> ()");
  library.impl("use", c10::DispatchKey::CUDA, TORCH_FN(simcuda::use));
}

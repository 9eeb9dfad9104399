// A device that computes on the CPU and that only tests use: torch's PrivateUse1, with memory of its own kind.
//
// Gloo refuses its tensors, as it refuses those of an Apple GPU; its storages can be told to refuse resizing, as MPS
// storages do; and its allocator counts live and peak bytes exactly. Kernels run through torch's CPU fallback, and
// refuse operands of two devices.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>

namespace {

const at::Device DEVICE(at::kPrivateUse1, 0);
std::atomic<int64_t> live_bytes{0}, peak_bytes{0};
std::atomic<bool> refuses_resize{false}, refuses_bfloat16{false}, ignores_offsets{false};

struct Block {
  void* data;
  int64_t size;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  live_bytes -= block->size;
  std::free(block->data);
  delete block;
}

struct CountingAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, DEVICE};
    auto* block = new Block{std::aligned_alloc(64, (size + 63) / 64 * 64), static_cast<int64_t>(size)};
    TORCH_CHECK(block->data, "the emulated device is out of memory");
    int64_t now = live_bytes += block->size, peak = peak_bytes;
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {}
    return {block->data, block, &free_block, DEVICE};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

CountingAllocator allocator;
REGISTER_ALLOCATOR(at::kPrivateUse1, &allocator)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return at::kPrivateUse1; }
  at::Device exchangeDevice(at::Device) const override { return DEVICE; }
  at::Device getDevice() const override { return DEVICE; }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  at::DeviceIndex deviceCount() const noexcept override { return 1; }
  at::Stream getStream(at::Device) const override { return at::Stream(at::Stream::DEFAULT, DEVICE); }
  at::Stream getNewStream(at::Device, int) const override { return at::Stream(at::Stream::DEFAULT, DEVICE); }
  at::Stream exchangeStream(at::Stream) const override { return at::Stream(at::Stream::DEFAULT, DEVICE); }
  void record(void**, const at::Stream&, const at::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const at::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const at::Stream&) const override { return true; }
  void synchronizeStream(const at::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const at::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const at::Storage& storage, size_t size) const override {
    TORCH_CHECK(!refuses_resize, "UntypedStorage.resize_: got unexpected device type emulated");
    at::DataPtr data = allocator.allocate(size);
    if (storage.nbytes() && size) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

Hooks hooks;
const bool registered = [] { return at::RegisterPrivateUse1HooksInterface(&hooks), true; }();

// No float64, as on MPS; bfloat16 on request.
void check_dtype(std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(dtype != at::kDouble, "Cannot convert an emulated Tensor to float64 dtype");
  TORCH_CHECK(!refuses_bfloat16 || dtype != at::kBFloat16, "BFloat16 is not supported on the emulated device");
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  check_dtype(dtype);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  check_dtype(dtype);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// The same memory, seen as a CPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// Told to, it reads a contiguous source from the beginning of its storage: a wrong answer of the kind MPS has given.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  auto from = source;
  if (source.is_privateuseone() && source.scalar_type() != self.scalar_type()) check_dtype(self.scalar_type());
  if (ignores_offsets && source.is_privateuseone() && self.is_cpu() && source.is_contiguous() && source.numel())
    from = source.as_strided(source.sizes(), source.strides(), 0);
  on_cpu(self).copy_(on_cpu(from));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(source));
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  on_cpu(to).copy_(on_cpu(source));
  return to;
}

// Of integers too, as a GPU's: transformers counts so on every device that is no CPU.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return on_cpu(self).to(at::kFloat).histc(bins, low, high).to(self.scalar_type()).to(DEVICE);
}

at::Scalar local_scalar(const at::Tensor& self) { return on_cpu(self).item(); }

// As on a GPU: an operation takes tensors of one device, but for numbers in tensors without dimensions. Stricter than
// CUDA, indices included, as those of the host would be uploaded while it waits. torch's fallback takes any mixture.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  bool here = false, elsewhere = false;
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) here = true;
    else if (tensor.is_cpu() && tensor.dim() > 0) elsewhere = true;
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) see(value.toTensor());
    else if (value.isTensorList()) { for (const at::Tensor& tensor : value.toTensorList()) see(tensor); }
    else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) if (tensor) see(*tensor);
    } else if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().type() == at::kPrivateUse1,
                  "Expected a 'emulated' device type for generator but found 'cpu': ", op.schema().name());
    }
  }
  TORCH_CHECK(!(here && elsewhere), "Expected all tensors to be on the same device, but found at least two devices, ",
              "emulated and cpu: ", op.schema().name());
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, *stack);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("histc", &histc);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The products of MPS's autocast list.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("live_bytes", [] { return live_bytes.load(); });
  m.def("peak_bytes", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = live_bytes.load(); });
  m.def("refuse_resize", [](bool refuses) { refuses_resize = refuses; });
  m.def("refuse_bfloat16", [](bool refuses) { refuses_bfloat16 = refuses; });
  m.def("ignore_offsets", [](bool ignores) { ignores_offsets = ignores; });
}

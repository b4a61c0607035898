// An accelerator that is neither CUDA nor the CPU, for tests: torch's PrivateUse1 device in host memory.
//
// It has its own allocator with statistics, streams and events (work is done when it is issued), pinned memory, and
// collectives that hand the same memory to a Gloo backend. Operators run on the CPU (torch's fallback).

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <cstdlib>
#include <mutex>
#include <unordered_set>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int64_t TOTAL = int64_t(1) << 33;  // bytes of memory that the device claims to have
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};

// --- memory ---------------------------------------------------------------------------------------------------------

std::mutex lock;
int64_t allocated = 0, peak = 0;

struct Block {
  void* data;
  int64_t size;
};

void release(void* given) {
  auto* block = static_cast<Block*>(given);
  std::lock_guard<std::mutex> held(lock);
  allocated -= block->size;
  std::free(block->data);
  delete block;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr, int64_t(size)};
    std::lock_guard<std::mutex> held(lock);
    allocated += block->size;
    peak = std::max(peak, allocated);
    return {block->data, block, &release, c10::Device(TYPE, current)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = allocated;
      (*bytes)[0].peak = peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = allocated; }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return {TOTAL - allocated, TOTAL}; }
};

Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

std::unordered_set<const void*> pinned;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::aligned_alloc(64, (size + 63) / 64 * 64);
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(data);
    return {data, data, &unpin, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  static void unpin(void* data) {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(data);
    std::free(data);
  }
};

PinnedMemory pinned_memory;

// --- the device -----------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 2; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(lock);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

c10::Stream stream(c10::Device device, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device to) const override { auto from = getDevice(); setDevice(to); return from; }
  c10::Device getDevice() const override { return {TYPE, current}; }
  void setDevice(c10::Device to) const override { current = to.index() < 0 ? 0 : to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index() < 0 ? 0 : to.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_stream); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, ++last_stream); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto from = getStream(to.device());
    current_stream = to.id();
    return from;
  }
  // An event is recorded after its work is done, so nothing waits.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- operators ------------------------------------------------------------------------------------------------------

at::Tensor on_host(const at::Tensor& t) {
  if (!t.is_privateuseone()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(at::kCPU));
}

std::vector<at::Tensor> on_host(at::TensorList given) {
  std::vector<at::Tensor> found;
  for (const auto& t : given) found.push_back(on_host(t));
  return found;
}

constexpr c10::DispatchKeySet KEY(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEY, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, KEY, c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* self = t.unsafeGetTensorImpl();
  self->set_sizes_contiguous(sizes);
  size_t bytes = (self->storage_offset() + c10::multiply_integers(sizes)) * t.element_size();
  if (bytes > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), bytes);
  return t;
}

at::Tensor& set_storage(at::Tensor& t, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* self = t.unsafeGetTensorImpl();
  self->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.empty() && !sizes.empty()) self->set_sizes_contiguous(sizes);
  else self->set_sizes_and_strides(sizes, strides);
  self->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  return t;
}

at::Tensor& set_whole_storage(at::Tensor& t, at::Storage source) {
  int64_t count = source.nbytes() / t.element_size();
  std::vector<c10::SymInt> size{count};
  return set_storage(t, std::move(source), 0, size, {});
}

at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& source) {
  return set_storage(t, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) at::native::resize_output(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& t) { return on_host(t).item(); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// --- collectives ----------------------------------------------------------------------------------------------------

using Work = c10::intrusive_ptr<c10d::Work>;

struct Collectives final : c10d::Backend {
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "stand_in"; }
  Work broadcast(std::vector<at::Tensor>& t, const c10d::BroadcastOptions& o) override {
    auto host = on_host(t);
    return gloo->broadcast(host, o);
  }
  Work allreduce(std::vector<at::Tensor>& t, const c10d::AllreduceOptions& o) override {
    auto host = on_host(t);
    return gloo->allreduce(host, o);
  }
  Work allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                 const c10d::AllgatherOptions& o) override {
    std::vector<std::vector<at::Tensor>> outs;
    for (auto& one : out) outs.push_back(on_host(one));
    auto ins = on_host(in);
    return gloo->allgather(outs, ins, o);
  }
  Work _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return gloo->_allgather_base(to, from, o);
  }
  Work _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return gloo->_reduce_scatter_base(to, from, o);
  }
  Work allreduce_coalesced(std::vector<at::Tensor>& t, const c10d::AllreduceCoalescedOptions& o) override {
    auto host = on_host(t);
    return gloo->allreduce_coalesced(host, o);
  }
  Work allgather_into_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                       const c10d::AllgatherOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return gloo->allgather_into_tensor_coalesced(to, from, o);
  }
  Work reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& out, std::vector<at::Tensor>& in,
                                       const c10d::ReduceScatterOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return gloo->reduce_scatter_tensor_coalesced(to, from, o);
  }
  Work alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                     const c10d::AllToAllOptions& o) override {
    auto to = on_host(out), from = on_host(in);
    return gloo->alltoall_base(to, from, out_sizes, in_sizes, o);
  }
  Work send(std::vector<at::Tensor>& t, int to, int tag) override {
    auto host = on_host(t);
    return gloo->send(host, to, tag);
  }
  Work recv(std::vector<at::Tensor>& t, int from, int tag) override {
    auto host = on_host(t);
    return gloo->recv(host, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& given) override {
    auto o = given;
    o.device_ids.clear();
    return gloo->barrier(o);
  }
  c10::intrusive_ptr<c10d::Backend> gloo;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(gloo);
  });
}

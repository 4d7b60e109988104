// An accelerator that is none: two devices without memory of their own, a pinned allocator that
// counts what it does and takes as long as a test asks for, and memory that is registered with it. `slate.py` builds and describes it.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

namespace {

constexpr auto kSlate = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

thread_local c10::DeviceIndex current = 0;
std::mutex guard;
std::map<uintptr_t, size_t> pinned;  // where allocations begin, and their sizes
std::atomic<long> bytes{0}, peak{0}, allocations{0}, delay{0}, refused{0}, registered{0};
std::atomic<int> last_device{-1};

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(guard);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(data));
  if (after == pinned.begin()) return false;
  --after;
  return reinterpret_cast<uintptr_t>(data) < after->first + after->second;
}

void release(void* data) {
  if (data == nullptr) return;
  {
    std::lock_guard<std::mutex> held(guard);
    auto found = pinned.find(reinterpret_cast<uintptr_t>(data));
    bytes -= static_cast<long>(found->second);
    pinned.erase(found);
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    TORCH_CHECK(!refused, "slate: no pinned memory is left");
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    void* data = nullptr;
    if (size > 0) {
      data = std::aligned_alloc(64, (size + 63) / 64 * 64);
      std::lock_guard<std::mutex> held(guard);
      pinned[reinterpret_cast<uintptr_t>(data)] = size;
      bytes += static_cast<long>(size);
      if (bytes > peak) peak = bytes.load();
    }
    ++allocations;
    last_device = current;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

PinnedAllocator allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }  // these two override nothing in torch 2.6
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &allocator; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSlate; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSlate, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "slate: there is no device ", int(device.index()));
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

Hooks hooks;
const bool is_known = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

}  // namespace

extern "C" {
void slate_take(long microseconds) { delay = microseconds; }
void slate_refuse(long yes) { refused = yes; }
long slate_register(uintptr_t address, size_t size) {
  std::lock_guard<std::mutex> held(guard);
  if (refused) return 2;
  auto after = pinned.lower_bound(address);
  if (after != pinned.end() && after->first < address + size) return 712;
  if (after != pinned.begin() && (--after)->first + after->second > address) return 712;
  pinned[address] = size;
  registered += static_cast<long>(size);
  return 0;
}
long slate_unregister(uintptr_t address) {
  std::lock_guard<std::mutex> held(guard);
  auto found = pinned.find(address);
  if (found == pinned.end()) return 713;
  registered -= static_cast<long>(found->second);
  pinned.erase(found);
  return 0;
}
long slate_registered() { return registered; }
long slate_allocations() { return allocations; }
long slate_bytes() { return bytes; }
long slate_peak() { return peak; }
int slate_last_device() { return last_device; }
}

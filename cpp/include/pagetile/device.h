#pragma once

#include <cstdint>

namespace pagetile {

enum class DeviceKind : uint8_t { kCpu, kCuda };

// Where the tensors of a call live. All of them live on one device.
struct Device {
    DeviceKind kind = DeviceKind::kCpu;
    int32_t index = 0;

    bool operator==(const Device&) const = default;
};

// A CUDA stream as an address, so that these headers need no CUDA. 0 is the legacy default stream;
// the CPU ignores it.
using Stream = uintptr_t;

}  // namespace pagetile

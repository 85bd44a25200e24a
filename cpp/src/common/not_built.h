#pragma once

#include "pagetile/device.h"

namespace pagetile {

// For an operation that the tensors' device has no kernel for: says which GPU it is and which
// kernels this build has.
[[noreturn]] void throw_not_built(const char* function, Device device);

}  // namespace pagetile

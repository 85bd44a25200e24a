#pragma once

#include "pagetile/device.h"

#include <string>

namespace pagetile {

// For an operation that the tensors' device has no kernel for: says which GPU it is, and which
// architectures and kernels this build has.
[[noreturn]] void throw_not_built(const char* function, Device device);

// Its message. gpu: "CUDA device 0 (NVIDIA T4, capability 7.5)".
std::string not_built_message(const char* function, const std::string& gpu);

}  // namespace pagetile

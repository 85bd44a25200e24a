#pragma once

#include "pagetile/config.h"

#include <string_view>

namespace pagetile {

// Whether kernels built for these architectures ("80;90a-real", as CMake spells them) run on a GPU
// of this compute capability, by machine code or PTX.
bool covers(std::string_view architectures, int capability_major, int capability_minor);

// Runs the probe kernel of each family that covers a GPU and returns the families' names. What does
// not run, or writes anything but what it should, is a std::runtime_error.
std::vector<std::string> run_probes(int device_index);

}  // namespace pagetile

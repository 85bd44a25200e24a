#pragma once

#include "common/cpu_kernels.h"

#include <vector>

namespace pagetile {

struct CpuKernelSet {
    const CpuKernels* kernels;
    bool supported;  // by this machine
};

// Every set that was built, best first. The last one runs everywhere.
const std::vector<CpuKernelSet>& cpu_kernel_sets();

}  // namespace pagetile

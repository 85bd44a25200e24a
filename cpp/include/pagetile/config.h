#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pagetile {

// The kernels of one family: "cpu", "sm80" (portable CUDA), "sm90" (Hopper).
struct KernelFamily {
    std::string name;
    std::vector<std::string>
        targets;  // instruction sets of the CPU family, GPU architectures of the others
    std::vector<std::string> kernels;  // operations that have a kernel in this family
};

struct BuildInfo {
    std::string version;
    // The commit, with "-dirty" if the sources differed from it; "unknown" outside a checkout.
    std::string git_hash;
    std::string build_type;
    std::string compiler;
    std::string cuda_version;  // of nvcc; empty if the CUDA part was not built
    std::string cpu_isa;       // the instruction set whose CPU kernels this process runs
    std::string openmp;        // date of the specification, "201511"; empty: one thread only
    std::vector<KernelFamily> families;
};

struct DeviceInfo {
    int index;  // CUDA's ordinal
    std::string name;
    int capability_major;
    int capability_minor;
    size_t memory_bytes;
    std::vector<std::string>
        families;  // families whose kernels run on it; empty: pagetile does not cover it
};

struct Devices {
    std::vector<DeviceInfo> found;
    std::string
        reason;  // why there is none: no CUDA part, no driver, no device; empty if some were found
};

BuildInfo build_info();

// Needs neither a driver nor a GPU and does not throw for want of them. It makes no CUDA context.
Devices devices();

}  // namespace pagetile

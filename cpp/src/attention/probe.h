#pragma once

#include <cstdint>

// A build probe for each kernel family. It computes nothing of use: it proves that its sources
// compile against CuTe, link with the static CUDA runtime and load on a GPU of its architectures.
// It goes when the family gets its first kernel.

namespace pagetile {

inline constexpr int kProbeRows = 8;
inline constexpr int kProbeColumns = 16;

constexpr int probe_value(int family, int row, int column) {
    return family * 1000 + row * kProbeColumns + column;
}

// cells: device memory, [kProbeRows, kProbeColumns], row-major. Returns the launch's cudaError_t.
namespace sm80 {
int launch_probe(int* cells, uintptr_t stream);
}

namespace sm90 {
int launch_probe(int* cells, uintptr_t stream);
}

}  // namespace pagetile

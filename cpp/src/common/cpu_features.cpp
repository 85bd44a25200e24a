// Picks the CPU kernels once: the build has one set for each instruction set level, and the machine
// decides.

#include "common/cpu_features.h"

#include <cstdlib>
#include <string_view>

namespace pagetile {

#if PAGETILE_HAS_X86_64_V1
namespace x86_64_v1 {
extern const CpuKernels kKernels;
}

namespace x86_64_v3 {
extern const CpuKernels kKernels;
}

namespace x86_64_v4 {
extern const CpuKernels kKernels;
}
#else
namespace generic {
extern const CpuKernels kKernels;
}
#endif

const std::vector<CpuKernelSet>& cpu_kernel_sets() {
#if PAGETILE_HAS_X86_64_V1
    static const std::vector<CpuKernelSet> sets = {
        {&x86_64_v4::kKernels, __builtin_cpu_supports("x86-64-v4") != 0},
        {&x86_64_v3::kKernels, __builtin_cpu_supports("x86-64-v3") != 0},
        {&x86_64_v1::kKernels, true},
    };
#else
    static const std::vector<CpuKernelSet> sets = {{&generic::kKernels, true}};
#endif
    return sets;
}

const CpuKernels& cpu_kernels() {
    static const CpuKernels& chosen = []() -> const CpuKernels& {
        const char* wanted = std::getenv("PAGETILE_CPU_ISA");
        const CpuKernels* best = nullptr;
        for (const CpuKernelSet& set : cpu_kernel_sets()) {
            if (set.supported && best == nullptr) {
                best = set.kernels;
            }
            if (set.supported && wanted != nullptr &&
                std::string_view(wanted) == set.kernels->isa) {
                return *set.kernels;
            }
        }
        return *best;
    }();
    return chosen;
}

}  // namespace pagetile

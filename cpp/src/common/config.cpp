#include "pagetile/config.h"

#include "build_values.h"
#include "common/cpu_kernels.h"

#include <sstream>

namespace pagetile {
namespace {

std::vector<std::string> split(const char* list) {
    std::vector<std::string> items;
    std::istringstream text(list);
    for (std::string item; std::getline(text, item, ';');) {
        items.push_back(item);
    }
    return items;
}

// What every family of GPU kernels has, and what one has besides.
[[maybe_unused]] std::vector<std::string> gpu_kernels(std::vector<std::string> more = {}) {
    std::vector<std::string> kernels = {
        "cache_write",
        "copy_pages",
        "paged_attention",
        "merge_states",
        "split_kv (mma.sync)",
        "prefill (mma.sync)",
    };
    kernels.insert(kernels.end(), more.begin(), more.end());
    return kernels;
}

#ifdef _OPENMP
const std::string kOpenMp = std::to_string(_OPENMP);
#else
const std::string kOpenMp;
#endif

}  // namespace

BuildInfo build_info() {
    BuildInfo info{
        .version = PAGETILE_VERSION,
        .git_hash = PAGETILE_GIT_HASH,
        .build_type = PAGETILE_BUILD_TYPE,
        .compiler = PAGETILE_COMPILER,
        .cuda_version = PAGETILE_CUDA_VERSION,
        .cpu_isa = cpu_kernels().isa,
        .openmp = kOpenMp,
        .families = {},
    };
    info.families.push_back({
        .name = "cpu",
        .targets = split(PAGETILE_CPU_ISAS),
        .kernels = {"cache_write", "copy_pages", "paged_attention", "merge_states"},
    });
#if PAGETILE_HAS_SM80
    info.families.push_back(
        {.name = "sm80", .targets = split(PAGETILE_SM80_ARCHITECTURES), .kernels = gpu_kernels()}
    );
#endif
#if PAGETILE_HAS_SM90
    info.families.push_back(
        {.name = "sm90",
         .targets = split(PAGETILE_SM90_ARCHITECTURES),
         .kernels = gpu_kernels({"prefill (TMA, WGMMA)", "prefill (TMA, WGMMA of e4m3)"})}
    );
#endif
    return info;
}

}  // namespace pagetile

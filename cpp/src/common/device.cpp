#include "common/device.h"

#include "attention/probe.h"
#include "build_values.h"
#include "pagetile/error.h"

#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#if PAGETILE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace pagetile {
namespace {

bool covers_one(std::string_view architecture, int capability_major, int capability_minor) {
    int number = 0;
    const char* end = architecture.data() + architecture.size();
    const char* suffix = std::from_chars(architecture.data(), end, number).ptr;
    const std::string_view kind(suffix, end);
    const int built_major = number / 10;
    const int built_minor = number % 10;
    if (kind.starts_with('a')) {  // architecture-specific: that GPU alone
        return capability_major == built_major && capability_minor == built_minor;
    }
    const bool same_family = capability_major == built_major && capability_minor >= built_minor;
    if (kind.starts_with('f')) {  // the PTX of a family runs on no other
        return same_family;
    }
    const bool machine_code = kind != "-virtual" && same_family;
    const bool ptx = kind != "-real" && std::pair(capability_major, capability_minor) >=
                                            std::pair(built_major, built_minor);
    return machine_code || ptx;
}

}  // namespace

bool covers(std::string_view architectures, int capability_major, int capability_minor) {
    while (!architectures.empty()) {
        const size_t length = std::min(architectures.find(';'), architectures.size());
        if (covers_one(architectures.substr(0, length), capability_major, capability_minor)) {
            return true;
        }
        architectures.remove_prefix(std::min(length + 1, architectures.size()));
    }
    return false;
}

#if PAGETILE_HAS_CUDA

namespace {

struct Family {
    const char* name;
    int number;
    std::string_view architectures;
    int (*launch_probe)(int* cells, uintptr_t stream);
};

constexpr Family kFamilies[] = {
#if PAGETILE_HAS_SM80
    {"sm80", 80, PAGETILE_SM80_ARCHITECTURES, &sm80::launch_probe},
#endif
#if PAGETILE_HAS_SM90
    {"sm90", 90, PAGETILE_SM90_ARCHITECTURES, &sm90::launch_probe},
#endif
};

void check_cuda(int status, const char* what) {
    if (status != cudaSuccess) {
        const char* text = cudaGetErrorString(static_cast<cudaError_t>(status));
        throw std::runtime_error(message(what, ": ", text));
    }
}

void run_probe(const Family& family) {
    int host[kProbeRows][kProbeColumns] = {};
    int* cells = nullptr;
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&cells), sizeof(host)), "run_probes");
    int status = family.launch_probe(cells, 0);
    if (status == cudaSuccess) {
        status = cudaMemcpy(host, cells, sizeof(host), cudaMemcpyDeviceToHost);
    }
    cudaFree(cells);
    check_cuda(status, family.name);
    for (int row = 0; row < kProbeRows; ++row) {
        for (int column = 0; column < kProbeColumns; ++column) {
            if (host[row][column] != probe_value(family.number, row, column)) {
                throw std::runtime_error(message(
                    "run_probes: ",
                    family.name,
                    " wrote ",
                    host[row][column],
                    " at ",
                    row,
                    ", ",
                    column
                ));
            }
        }
    }
}

}  // namespace

Devices devices() {
    Devices result;
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess) {
        cudaGetLastError();  // or the next call, maybe somebody else's, would report it
        int driver = 0;
        cudaDriverGetVersion(&driver);
        result.reason = driver == 0 ? "no CUDA driver is installed" : cudaGetErrorString(status);
        return result;
    }
    for (int index = 0; index < count; ++index) {
        cudaDeviceProp properties;
        check_cuda(cudaGetDeviceProperties(&properties, index), "devices");
        DeviceInfo info{
            .index = index,
            .name = properties.name,
            .capability_major = properties.major,
            .capability_minor = properties.minor,
            .memory_bytes = properties.totalGlobalMem,
            .families = {},
        };
        for (const Family& family : kFamilies) {
            if (covers(family.architectures, properties.major, properties.minor)) {
                info.families.emplace_back(family.name);
            }
        }
        result.found.push_back(std::move(info));
    }
    return result;
}

std::vector<std::string> run_probes(int device_index) {
    const std::vector<DeviceInfo> found = devices().found;
    if (device_index < 0 || device_index >= static_cast<int>(found.size())) {
        throw std::runtime_error(
            message("run_probes: no device ", device_index, " among ", found.size())
        );
    }
    int previous = 0;
    check_cuda(cudaGetDevice(&previous), "run_probes");
    check_cuda(cudaSetDevice(device_index), "run_probes");
    const std::vector<std::string>& families = found[device_index].families;
    for (const Family& family : kFamilies) {
        if (std::find(families.begin(), families.end(), family.name) != families.end()) {
            run_probe(family);
        }
    }
    check_cuda(cudaSetDevice(previous), "run_probes");
    return families;
}

#else

Devices devices() { return {.found = {}, .reason = "this build of pagetile has no CUDA part"}; }

std::vector<std::string> run_probes(int /*device_index*/) { return {}; }

#endif

}  // namespace pagetile

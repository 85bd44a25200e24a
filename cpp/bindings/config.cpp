#include "pagetile/config.h"

#include "common/device.h"
#include "common/not_built.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;

namespace {

nb::dict build_info() {
    const pagetile::BuildInfo info = pagetile::build_info();
    nb::dict families;
    for (const pagetile::KernelFamily& family : info.families) {
        nb::dict entry;
        entry["targets"] = family.targets;
        entry["kernels"] = family.kernels;
        families[family.name.c_str()] = entry;
    }
    nb::dict result;
    result["version"] = info.version;
    result["git_hash"] = info.git_hash;
    result["build_type"] = info.build_type;
    result["compiler"] = info.compiler;
    result["cuda_version"] = info.cuda_version;
    result["cpu_isa"] = info.cpu_isa;
    result["openmp"] = info.openmp;
    result["families"] = families;
    return result;
}

nb::list devices() {
    nb::list result;
    for (const pagetile::DeviceInfo& device : pagetile::devices().found) {
        nb::dict entry;
        entry["index"] = device.index;
        entry["name"] = device.name;
        entry["capability"] = nb::make_tuple(device.capability_major, device.capability_minor);
        entry["memory_bytes"] = device.memory_bytes;
        entry["families"] = device.families;
        result.append(entry);
    }
    return result;
}

}  // namespace

void export_config(nb::module_& m) {
    m.def(
        "build_info",
        &build_info,
        nb::sig("def build_info() -> dict[str, object]"),
        "What this build contains."
    );
    m.def(
        "not_built_message",
        [](const std::string& function, const std::string& gpu) {
            return pagetile::not_built_message(function.c_str(), gpu);
        },
        nb::arg("function"),
        nb::arg("gpu"),
        nb::sig("def not_built_message(function: str, gpu: str) -> str"),
        "What a call says for a GPU that this build has no code for."
    );
    m.def(
        "devices",
        &devices,
        nb::sig("def devices() -> list[dict[str, object]]"),
        "The GPUs that CUDA sees."
    );
    m.def(
        "no_devices_reason",
        [] { return pagetile::devices().reason; },
        "Why devices() is empty; an empty string if it is not."
    );
    m.def(
        "covers",
        &pagetile::covers,
        nb::arg("architectures"),
        nb::arg("capability_major"),
        nb::arg("capability_minor"),
        "Whether kernels built for these architectures ('80;90a-real') run on a GPU of this "
        "compute capability."
    );
    m.def(
        "run_probes",
        &pagetile::run_probes,
        nb::arg("device_index"),
        nb::sig("def run_probes(device_index: int) -> list[str]"),
        "Run the build probe of each kernel family that covers a GPU; return the families that "
        "passed."
    );
}

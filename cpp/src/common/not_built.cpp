#include "common/not_built.h"

#include "pagetile/config.h"
#include "pagetile/error.h"

#include <string>

namespace pagetile {

void throw_not_built(const char* function, Device device) {
    std::string gpu = message("CUDA device ", device.index);
    for (const DeviceInfo& info : devices().found) {
        if (info.index == device.index) {
            gpu = message(
                gpu,
                " (",
                info.name,
                ", capability ",
                info.capability_major,
                ".",
                info.capability_minor,
                ")"
            );
        }
    }
    throw NotBuiltError(not_built_message(function, gpu));
}

std::string not_built_message(const char* function, const std::string& gpu) {
    std::string built;
    for (const KernelFamily& family : build_info().families) {
        built += message(built.empty() ? "" : "; ", family.name, " for ");
        for (const std::string& target : family.targets) {
            built += message(&target == &family.targets.front() ? "" : ", ", target);
        }
        built += ":";
        for (const std::string& kernel : family.kernels) {
            built += " " + kernel;
        }
        built += family.kernels.empty() ? " none" : "";
    }
    return message(function, ": not built for ", gpu, "; built: ", built);
}

}  // namespace pagetile

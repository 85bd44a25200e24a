#pragma once

#include "pagetile/attention.h"

namespace pagetile::gpu {

// The CUDA backend, for every GPU. The params have been checked.
void merge_states(const MergeStatesParams& params, Stream stream);

}  // namespace pagetile::gpu

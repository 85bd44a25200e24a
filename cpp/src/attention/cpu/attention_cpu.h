#pragma once

#include "pagetile/attention.h"

namespace pagetile::cpu {

// The CPU backend: same contract as the GPU's, fp32 accumulation. The params have been checked.
void paged_attention(const AttentionParams& params);
void merge_states(const MergeStatesParams& params);

}  // namespace pagetile::cpu

#pragma once

#include "attention/legacy/legacy.h"

namespace pagetile::gpu {

// `longest`: no sequence has more keys. As pagetile::legacy_attention, which has checked the rest.
std::string legacy_attention(
    const AttentionParams& params, const LegacyScratch& scratch, int64_t longest, Stream stream
);

}  // namespace pagetile::gpu

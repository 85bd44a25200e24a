#pragma once

#include "pagetile/cache_write.h"

namespace pagetile::cpu {

// The CPU backend. The params have been checked.
void cache_write(const CacheWriteParams& params);

}  // namespace pagetile::cpu

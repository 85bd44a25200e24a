#pragma once

#include "pagetile/cache_write.h"
#include "pagetile/copy_pages.h"

namespace pagetile::cpu {

// The CPU backend. The params have been checked and are not empty.
void cache_write(const CacheWriteParams& params);
void copy_pages(const CopyPagesParams& params);

}  // namespace pagetile::cpu

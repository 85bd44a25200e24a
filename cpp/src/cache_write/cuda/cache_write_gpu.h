#pragma once

#include "pagetile/cache_write.h"
#include "pagetile/copy_pages.h"

namespace pagetile::gpu {

// The CUDA backend, for every GPU. The params have been checked.
void cache_write(const CacheWriteParams& params, Stream stream);
void copy_pages(const CopyPagesParams& params, Stream stream);

}  // namespace pagetile::gpu

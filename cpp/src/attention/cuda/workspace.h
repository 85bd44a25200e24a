#pragma once

#include "pagetile/device.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pagetile::gpu {

// Memory of at least `bytes` that belongs to a stream, its counters zeroed when it was made. It
// stays at its place as long as the process lives, because captured graphs may hold it; a call that
// needs more gets another, twice as large. Safe during a capture: the allocation is not part of it.
char* stream_workspace(Device device, cudaStream_t stream, int64_t bytes);

}  // namespace pagetile::gpu

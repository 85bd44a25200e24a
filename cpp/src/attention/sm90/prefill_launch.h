#pragma once

#include "attention/dispatch.h"
#include "attention/sm90/prefill_params.h"
#include "attention/sm90/tile_shapes.h"
#include "pagetile/device.h"
#include "pagetile/dtype.h"

#include <cuda_runtime_api.h>

namespace pagetile::sm90 {

struct PrefillInstance {
    const void* kernel;
    PrefillTile tile;
    int shared_memory;  // bytes
};

// The instances, by the type of results, which is that of queries of 16 bits. Loading::kRows: transforms is
// false. Loading::kWidened: can_widen() said yes; kTransposed: multiplies_e4m3() did.
PrefillInstance prefill_half_t(HeadDims dims, bool transforms, Loading loading);
PrefillInstance prefill_bfloat16_t(HeadDims dims, bool transforms, Loading loading);

// Whether an instance is built that widens keys and values for such queries.
bool can_widen(DType q_dtype, HeadDims dims, bool transforms);

// The tensor maps of a call, and how its keys and values are loaded. False: there is no instance for
// tensors that lie like that.
bool describe_tensors(PrefillParams& params, DType q_dtype, DType kv_dtype, HeadDims dims);

void launch_prefill(
    PrefillParams& params,
    DType out_dtype,
    HeadDims dims,
    int num_ctas,
    Device device,
    cudaStream_t stream
);

}  // namespace pagetile::sm90

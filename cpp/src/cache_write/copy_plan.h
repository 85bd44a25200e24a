#pragma once

#include "pagetile/copy_pages.h"

#include <cstdint>

namespace pagetile {

// A page as dense runs of elements: the runs are numbered by up to four strided dimensions.
struct PageRuns {
    struct Dim {
        int64_t size;
        int64_t src_stride;
        int64_t dst_stride;
    };

    int64_t length = 1;  // elements of a run
    int64_t count = 1;   // runs of a page
    int num_dims = 0;
    Dim dims[PageShape::kMaxDims];  // the innermost first
};

// The longest runs that both sides allow.
PageRuns page_runs(const CopyPagesParams& params);

}  // namespace pagetile

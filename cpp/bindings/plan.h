#pragma once

#include "pagetile/attention.h"

#include <nanobind/nanobind.h>

#include <cstdint>

namespace pagetile {

// pagetile.Plan: a schedule in the memory of a device, and what it was made for.
struct Plan {
    PlanParams params;  // without its tensors, which live for one call
    bool has_cu_seqlens_q = false;
    int64_t page_size = 0;
    nanobind::object buffer;  // int32 [plan_size / 4], keeps the memory at `data`
    void* data = nullptr;

    // Throws std::invalid_argument, about the argument `name`, unless the schedule holds for a call
    // like this one.
    void require_fits(
        const char* function, const char* name, const PlanParams& call, int64_t call_page_size
    ) const;
};

// Null for None; what is no Plan is a TypeError.
const Plan* parse_plan(const char* function, const char* name, nanobind::handle object);

}  // namespace pagetile

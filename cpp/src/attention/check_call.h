#pragma once

#include "pagetile/attention.h"
#include "pagetile/device.h"

namespace pagetile {

// Throws std::invalid_argument on sizes, types and options that attention cannot take, and, with
// params.validate, on metadata that is out of range: then it waits for the stream.
void check_call(const AttentionParams& params, Stream stream);

}  // namespace pagetile

#pragma once

// The exact merge of two partial attentions. Part of the per-instruction-set kernels.

#include "attention/cpu/softmax.h"
#include "common/cpu_kernels.h"
#include "common/rows.h"
#include "common/vec.h"

namespace pagetile::PAGETILE_ISA {

// One row of one head: the weights of the two sides are exp(lse - max), and a side that saw no key
// has none.
inline void merge_row(
    const MergeStatesParams& params, int64_t token, int64_t head, RowReader read, RowWriter write
) {
    const int64_t size = static_cast<int64_t>(dtype_size(params.dtype));
    const auto finite = [](float lse) {
        return lse == kInfinity ? -kInfinity : lse;
    };  // FA2 writes +inf for no key
    const float lse_a =
        params.tokens_with_a >= 0 && token >= params.tokens_with_a
            ? -kInfinity
            : finite(
                  params.lse_a[head * params.lse_a_head_stride + token * params.lse_a_row_stride]
              );
    const float lse_b =
        finite(params.lse_b[head * params.lse_b_head_stride + token * params.lse_b_row_stride]);

    float lse = -kInfinity;
    float weight_a = 0.0f;
    float weight_b = 0.0f;
    const float largest =
        lse_b == lse_b ? larger(lse_a, lse_b) : lse_b;  // NaN from either side is kept
    if (largest != -kInfinity) {
        const float exp_a = exp2(broadcast((lse_a - largest) * kLog2e))[0];
        const float exp_b = exp2(broadcast((lse_b - largest) * kLog2e))[0];
        const float sum = exp_a + exp_b;
        lse = largest + log2_of(sum) * kLn2;
        weight_a = exp_a / sum;
        weight_b = exp_b / sum;
    }

    alignas(64) float values_a[kMaxHeadDim];
    alignas(64) float values_b[kMaxHeadDim];
    for (int64_t d = 0; d < params.head_dim; d += kMaxHeadDim) {
        const int64_t count = smaller<int64_t>(kMaxHeadDim, params.head_dim - d);
        const auto side =
            [&](const void* out, int64_t row_stride, int64_t head_stride, float* values) {
                read(
                    offset_bytes(out, token * row_stride + head * head_stride + d, size),
                    values,
                    count,
                    count,
                    0
                );
            };
        side(params.out_a, params.a_row_stride, params.a_head_stride, values_a);
        side(params.out_b, params.b_row_stride, params.b_head_stride, values_b);
        for (int64_t i = 0; i < count; ++i) {
            // An empty side may hold anything, NaN too: it is left out, not multiplied by 0.
            const float a = lse_a == -kInfinity ? 0.0f : weight_a * values_a[i];
            const float b = lse_b == -kInfinity ? 0.0f : weight_b * values_b[i];
            values_a[i] = a + b;
        }
        write(
            values_a,
            offset_bytes(
                params.out, token * params.out_row_stride + head * params.out_head_stride + d, size
            ),
            count
        );
    }
    if (params.lse != nullptr) {
        params.lse[head * params.lse_head_stride + token * params.lse_row_stride] = lse;
    }
}

inline void merge_states(const MergeStatesParams& params, int64_t token_begin, int64_t token_end) {
    const RowReader read = row_reader(params.dtype);
    const RowWriter write = row_writer(params.dtype);
    for (int64_t token = token_begin; token < token_end; ++token) {
        for (int64_t head = 0; head < params.num_heads; ++head) {
            merge_row(params, token, head, read, write);
        }
    }
}

}  // namespace pagetile::PAGETILE_ISA

#pragma once

#include "pagetile/attention.h"
#include "pagetile/cache_write.h"
#include "tensor.h"

#include <cstdint>
#include <optional>
#include <string>

// What the tensors and options of a call come to, whichever door they came through: DLPack, XLA, or
// shapes and dtypes alone. The parse functions throw std::invalid_argument on what does not fit.
namespace pagetile {

struct CacheWriteTensors {
    Tensor k;
    Tensor v;
    Tensor k_cache;
    Tensor v_cache;
    Tensor slot_mapping;
    Tensor k_scale;
    Tensor v_scale;
};

CacheWriteParams parse_cache_write(
    const CacheWriteTensors& tensors, const std::string& kv_dtype, const std::string& layout_name
);

struct AttentionTensors {
    Tensor q;
    Tensor k_cache;
    Tensor v_cache;
    Tensor block_table;
    Tensor seqused_k;
    Tensor cu_seqlens_q;
    Tensor cu_seqlens_k;
    Tensor alibi_slopes;
    Tensor sinks;
    Tensor q_scale;
    Tensor k_scale;
    Tensor v_scale;
    Tensor out;
    Tensor softmax_lse;
    Tensor workspace;
};

struct AttentionOptions {
    int64_t max_seqlen_q = 0;
    int64_t max_seqlen_k = 0;
    std::optional<double> softmax_scale = std::nullopt;  // 1 / sqrt(head_dim)
    bool causal = true;
    int64_t window_left = -1;
    int64_t window_right = -1;
    double softcap = 0.0;
    std::string kv_dtype = "auto";
    std::string layout = "NHD";
    int64_t num_splits = 0;
    bool batch_invariant = false;
    bool pdl = false;
    bool fp8_products = false;
    // PAGETILE_VALIDATE=1 in the environment sets it for every call.
    std::optional<bool> validate = std::nullopt;
};

// Without a plan.
AttentionParams parse_attention(const AttentionTensors& tensors, const AttentionOptions& options);

struct MergeTensors {
    Tensor out_a;
    Tensor lse_a;
    Tensor out_b;
    Tensor lse_b;
    Tensor out;
    Tensor lse;
};

MergeStatesParams parse_merge(const MergeTensors& tensors, int64_t tokens_with_a);

}  // namespace pagetile

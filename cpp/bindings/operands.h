#pragma once

#include "calls.h"

#include <string>

// The order of a call's operands, as pagetile.jax passes them. `next(function, name)` is the next
// one, or a tensor that is not given().
namespace pagetile {

template <class Next>
CacheWriteTensors cache_write_operands(Next&& next) {
    constexpr const char* kFunction = "cache_write";
    return {
        .k = next(kFunction, "k"),
        .v = next(kFunction, "v"),
        .k_cache = next(kFunction, "k_cache"),
        .v_cache = next(kFunction, "v_cache"),
        .slot_mapping = next(kFunction, "slot_mapping"),
        .k_scale = next(kFunction, "k_scale"),
        .v_scale = next(kFunction, "v_scale"),
    };
}

template <class Next>
AttentionTensors attention_operands(Next&& next) {
    constexpr const char* kFunction = "paged_attention";
    return {
        .q = next(kFunction, "q"),
        .k_cache = next(kFunction, "k_cache"),
        .v_cache = next(kFunction, "v_cache"),
        .block_table = next(kFunction, "block_table"),
        .seqused_k = next(kFunction, "seqused_k"),
        .cu_seqlens_q = next(kFunction, "cu_seqlens_q"),
        .cu_seqlens_k = Tensor(kFunction, "cu_seqlens_k"),
        .alibi_slopes = next(kFunction, "alibi_slopes"),
        .sinks = next(kFunction, "sinks"),
        .q_scale = next(kFunction, "q_scale"),
        .k_scale = next(kFunction, "k_scale"),
        .v_scale = next(kFunction, "v_scale"),
        .out = next(kFunction, "out"),
        .softmax_lse = next(kFunction, "softmax_lse"),
        .workspace = Tensor(kFunction, "workspace"),  // the library's own, one a stream
    };
}

}  // namespace pagetile

#pragma once

// Paged attention as it began. A CTA has one query head of one sequence, and either scans all of its
// keys or, in the second design, 512 of them; then another kernel sums the partitions. Scores lie in
// shared memory until the largest is known. Every head reads its KV head's keys and values again, and
// no tensor core is used.

#include "attention/cuda/widen.cuh"
#include "attention/legacy/legacy.h"
#include "common/ptx.cuh"

#include <cutlass/numeric_types.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pagetile::gpu {

inline constexpr int kLegacyThreads = 128;
inline constexpr int kLegacyCtas = 8;  // of a multiprocessor, if shared memory allows
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kLegacyReduceCtas = 1;  // 8 leave it 64 registers, and it spills (nvcc 13.0)
#else
inline constexpr int kLegacyReduceCtas = kLegacyCtas;
#endif
inline constexpr int kLegacyPiece = 8;  // keys whose values a lane reads at a time
inline constexpr int kLegacyMostHeadDim = 256;

// K: 16 bytes of each key of a page, then the next 16 bytes. V: an element of each key, then the next.
struct LegacyCache {
    const char* data;
    int64_t page_stride;  // bytes
    int64_t head_stride;
    int64_t step_stride;
    Scale scale;
};

struct LegacyParams {
    const void* q;
    int64_t q_row_stride;  // elements
    int64_t q_head_stride;
    LegacyCache k;
    LegacyCache v;
    const int32_t* block_table;
    int64_t block_table_stride;
    const int32_t* lengths;
    int32_t longest;
    int32_t num_pages;
    int32_t page_size_log2;
    int32_t head_dim;
    int32_t group;
    float scale;
    const float* alibi_slopes;
    int64_t alibi_batch_stride;
    int64_t alibi_head_stride;
    void* out;
    int64_t out_row_stride;  // elements
    int64_t out_head_stride;
    LegacyScratch scratch;
};

// The elements of 4 bytes of a cache.
template <class Stored>
__device__ __forceinline__ void to_floats(uint32_t word, float* to) {
    if constexpr (std::is_same_v<Stored, cutlass::bfloat16_t>) {
        to[0] = __uint_as_float(word << 16);
        to[1] = __uint_as_float(word & 0xffff0000);
    } else if constexpr (std::is_same_v<Stored, cutlass::half_t>) {
        const float2 two = __half22float2(reinterpret_cast<const __half2&>(word));
        to[0] = two.x;
        to[1] = two.y;
    } else {
        uint32_t low;
        uint32_t high;
        widen<Stored>(low, high, word);
        to_floats<cutlass::half_t>(low, to);
        to_floats<cutlass::half_t>(high, to + 2);
    }
}

__device__ __forceinline__ float scale_at(const Scale& scale, int sequence, int kv_head) {
    return scale.data == nullptr
               ? 1.0f
               : scale.data[sequence * scale.batch_stride + kv_head * scale.head_stride];
}

// Of all threads, for all threads. What was in `shared` before is no longer needed.
template <class Combine>
__device__ __forceinline__ float combine_over_cta(
    float value, float (&shared)[kLegacyThreads / 32], const Combine& combine
) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    value = shared[0];
#pragma unroll
    for (int warp = 1; warp < kLegacyThreads / 32; ++warp) {
        value = combine(value, shared[warp]);
    }
    return value;
}

// The keys that a CTA scans.
struct LegacyKeys {
    int sequence;
    int head;
    int kv_head;
    int length;  // of the sequence
    int begin;
    int end;

    __device__ LegacyKeys(const LegacyParams& params, bool is_partition) {
        sequence = static_cast<int>(blockIdx.x);
        head = static_cast<int>(blockIdx.y);
        kv_head = head / params.group;
        length = min(max(params.lengths[sequence], 0), params.longest);
        constexpr int kPartition = kLegacyPartition;
        begin = is_partition ? static_cast<int>(blockIdx.z) * kPartition : 0;
        end = is_partition ? min(begin + kPartition, length) : length;
    }

    // Where a key's page has the KV head; null outside of the pool: zeros.
    __device__ const char* find_page(
        const LegacyParams& params, const LegacyCache& cache, int key
    ) const {
        const int32_t page =
            params
                .block_table[sequence * params.block_table_stride + (key >> params.page_size_log2)];
        const bool is_page = static_cast<uint32_t>(page) < static_cast<uint32_t>(params.num_pages);
        return is_page ? cache.data + page * cache.page_stride + kv_head * cache.head_stride
                       : nullptr;
    }

    static __device__ int offset_in_page(const LegacyParams& params, int key) {
        return key & ((1 << params.page_size_log2) - 1);
    }
};

// A key with the query, which is in shared memory. Neighbouring threads have neighbouring keys.
template <class Stored>
__device__ __forceinline__ float multiply_key(
    const LegacyParams& params, const LegacyKeys& keys, int key, const float* query
) {
    static constexpr int kChunk = 16 / sizeof(Stored);
    const char* from = keys.find_page(params, params.k, key);
    if (from == nullptr) {
        return 0.0f;
    }
    from += LegacyKeys::offset_in_page(params, key) * 16;
    float sum = 0.0f;
    for (int element = 0; element < params.head_dim; element += kChunk) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(from);
        float k[kChunk];
        to_floats<Stored>(chunk.x, k);
        to_floats<Stored>(chunk.y, k + kChunk / 4);
        to_floats<Stored>(chunk.z, k + kChunk / 2);
        to_floats<Stored>(chunk.w, k + kChunk / 4 * 3);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            sum = fmaf(query[element + i], k[i], sum);
        }
        from += params.k.step_stride;
    }
    return sum;
}

// An element of V over the CTA's keys, by a warp; keys behind the end are read with their neighbours, and
// left out.
template <class Stored>
__device__ __forceinline__ float multiply_values(
    const LegacyParams& params, const LegacyKeys& keys, int element, const float* weights
) {
    static constexpr int kWords = kLegacyPiece * sizeof(Stored) / 4;
    using Words = std::conditional_t<kWords == 4, uint4, uint2>;
    float sum = 0.0f;
    for (int key = keys.begin + static_cast<int>(threadIdx.x % 32) * kLegacyPiece; key < keys.end;
         key += 32 * kLegacyPiece) {
        const char* from = keys.find_page(params, params.v, key);
        if (from == nullptr) {
            continue;
        }
        from += element * params.v.step_stride +
                LegacyKeys::offset_in_page(params, key) * static_cast<int>(sizeof(Stored));
        const Words words = *reinterpret_cast<const Words*>(from);
        float v[kLegacyPiece];
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            to_floats<Stored>(
                reinterpret_cast<const uint32_t*>(&words)[i], v + i * (4 / sizeof(Stored))
            );
        }
#pragma unroll
        for (int i = 0; i < kLegacyPiece; ++i) {
            sum += key + i < keys.end ? weights[key + i - keys.begin] * v[i] : 0.0f;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
    }
    return sum;
}

// Dynamic shared memory: the query, and the scores of all keys that a CTA scans.
template <class Element, class Stored, bool kPartitions>
__global__ void __launch_bounds__(kLegacyThreads, kLegacyCtas) legacy_kernel(
    const __grid_constant__ LegacyParams params
) {
    extern __shared__ float legacy_shared[];
    __shared__ float of_warps[kLegacyThreads / 32];
    float* const query = legacy_shared;
    float* const scores = legacy_shared + kLegacyMostHeadDim;
    const LegacyKeys keys(params, kPartitions);
    const int count = keys.end - keys.begin;
    const auto thread = static_cast<int>(threadIdx.x);

    // Where the results go: those of a partition to the scratch.
    const int64_t slot =
        (static_cast<int64_t>(keys.sequence) * gridDim.y + keys.head) * params.scratch.partitions +
        blockIdx.z;
    auto* out = kPartitions
                    ? static_cast<Element*>(params.scratch.tmp_out) + slot * params.head_dim
                    : static_cast<Element*>(params.out) + keys.sequence * params.out_row_stride +
                          keys.head * params.out_head_stride;
    if (count <= 0) {
        for (int element = thread; !kPartitions && element < params.head_dim;
             element += kLegacyThreads) {
            out[element] = Element(0.0f);
        }
        return;
    }

    const auto* q = static_cast<const Element*>(params.q) + keys.sequence * params.q_row_stride +
                    keys.head * params.q_head_stride;
    const float factor = params.scale * scale_at(params.k.scale, keys.sequence, keys.kv_head);
    for (int element = thread; element < params.head_dim; element += kLegacyThreads) {
        query[element] = static_cast<float>(q[element]);
    }
    __syncthreads();

    const float slope = params.alibi_slopes == nullptr
                            ? 0.0f
                            : params.alibi_slopes
                                  [keys.sequence * params.alibi_batch_stride +
                                   keys.head * params.alibi_head_stride];
    float largest = -__builtin_huge_valf();
    for (int i = thread; i < count; i += kLegacyThreads) {
        const int key = keys.begin + i;
        const float score = factor * multiply_key<Stored>(params, keys, key, query) +
                            slope * static_cast<float>(key - (keys.length - 1));
        scores[i] = score;
        largest = fmaxf(largest, score);
    }
    largest = combine_over_cta(largest, of_warps, [](float a, float b) { return fmaxf(a, b); });

    float sum = 0.0f;
    for (int i = thread; i < count; i += kLegacyThreads) {
        scores[i] = __expf(scores[i] - largest);
        sum += scores[i];
    }
    sum = combine_over_cta(sum, of_warps, [](float a, float b) { return a + b; });

    const float over_sum = scale_at(params.v.scale, keys.sequence, keys.kv_head) / sum;
    for (int element = thread / 32; element < params.head_dim; element += kLegacyThreads / 32) {
        const float value = multiply_values<Stored>(params, keys, element, scores) * over_sum;
        if (thread % 32 == 0) {
            out[element] = Element(value);
        }
    }
    if (kPartitions && thread == 0) {
        params.scratch.exp_sums[slot] = sum;
        params.scratch.max_logits[slot] = largest;
    }
}

// The partitions of a row, weighted by their sums.
template <class Element>
__global__ void __launch_bounds__(kLegacyThreads, kLegacyReduceCtas) legacy_reduce_kernel(
    const __grid_constant__ LegacyParams params
) {
    const LegacyKeys keys(params, /*is_partition=*/false);
    constexpr int kPartition = kLegacyPartition;
    const int used = (keys.length + kPartition - 1) / kPartition;
    const int64_t first =
        (static_cast<int64_t>(keys.sequence) * gridDim.y + keys.head) * params.scratch.partitions;
    const float* sums = params.scratch.exp_sums + first;
    const float* maxima = params.scratch.max_logits + first;
    float largest = -__builtin_huge_valf();
    for (int i = 0; i < used; ++i) {
        largest = fmaxf(largest, maxima[i]);
    }
    float total = 0.0f;
    for (int i = 0; i < used; ++i) {
        total += sums[i] * __expf(maxima[i] - largest);
    }
    const auto* parts =
        static_cast<const Element*>(params.scratch.tmp_out) + first * params.head_dim;
    auto* out = static_cast<Element*>(params.out) + keys.sequence * params.out_row_stride +
                keys.head * params.out_head_stride;
    for (int element = static_cast<int>(threadIdx.x); element < params.head_dim;
         element += kLegacyThreads) {
        float value = 0.0f;
        for (int i = 0; i < used; ++i) {
            value += sums[i] * __expf(maxima[i] - largest) *
                     static_cast<float>(parts[i * params.head_dim + element]);
        }
        out[element] = Element(used == 0 ? 0.0f : value / total);
    }
}

}  // namespace pagetile::gpu

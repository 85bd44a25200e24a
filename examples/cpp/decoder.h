#pragma once

// A batch of sequences at a place, the GPU or the CPU: the tensors of its layers, the metadata of a
// step, and the calls of pagetile that a prompt and a step take.

#include "pagetile/attention.h"
#include "pagetile/block_pool.h"
#include "pagetile/cache_write.h"
#include "place.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

constexpr int64_t kLayers = 2;
constexpr int64_t kHeads = 8, kKvHeads = 2, kDim = 128;
constexpr int64_t kRow = kHeads * kDim, kKvRow = kKvHeads * kDim;
constexpr int64_t kBatch = 3;
constexpr int64_t kMostTokens = 142;  // of a step, the prompts' step too
constexpr int64_t kMostKeys = 128;    // of a sequence
constexpr int64_t kSlots = 384;       // of the pool

// What a launch depends on, besides the lengths. It stays in a captured graph.
struct Shape {
    int64_t tokens;        // of the batch
    int64_t max_seqlen_q;  // of a sequence, at most
};

constexpr Shape kPrefill{.tokens = kMostTokens, .max_seqlen_q = 100};
constexpr Shape kDecode{.tokens = kBatch, .max_seqlen_q = 1};

// What a model computes in a layer: q [tokens, kHeads, kDim], k and v [tokens, kKvHeads, kDim].
struct Rows {
    std::vector<float> q, k, v;
};

inline uint16_t to_bf16(float x) {  // to nearest, ties to even
    const auto bits = std::bit_cast<uint32_t>(x);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

class Decoder {
public:
    // dtype: fp32 (on the CPU alone) or bf16.
    Decoder(const Place& place, pagetile::DType dtype, int64_t page_size)
        : place_(place),
          dtype_(dtype),
          page_size_(page_size),
          max_pages_(kMostKeys / page_size),
          pool_(kSlots / page_size, page_size),
          slots_(place, kMostTokens * sizeof(int64_t)),
          block_table_(place, kBatch * max_pages_ * sizeof(int32_t)),
          seqused_k_(place, kBatch * sizeof(int32_t)),
          cu_seqlens_q_(place, (kBatch + 1) * sizeof(int32_t)),
          plan_(place, pagetile::plan_size(plan_params(kDecode))),
          // One for both kinds of calls: they never run at the same time.
          workspace_(
              place,
              std::max(
                  pagetile::workspace_size(plan_params(kPrefill)),
                  pagetile::workspace_size(plan_params(kDecode))
              )
          ) {
        for (int64_t i = 0; i < kLayers; ++i) {
            layers_.emplace_back(place, static_cast<int64_t>(pagetile::dtype_size(dtype)));
        }
        workspace_.fill(0);  // once: each call leaves it ready for the next
    }

    // Empty sequences in place of the last ones.
    void restart() {
        for (const int64_t sequence : sequences_) {
            pool_.free(sequence);
        }
        sequences_.clear();
        for (int64_t i = 0; i < kBatch; ++i) {
            sequences_.push_back(pool_.allocate());
        }
    }

    // Brings a step to the device: its slots and lengths, and the rows of each layer.
    void load(const std::vector<int64_t>& num_tokens, const std::vector<Rows>& rows) {
        pool_.append(sequences_, num_tokens, step_);
        slots_.upload(step_.slot_mapping);
        seqused_k_.upload(step_.seqused_k);
        cu_seqlens_q_.upload(step_.cu_seqlens_q);
        // The pool's table grows with the sequences; the calls' table is as wide as it can become.
        std::vector<int32_t> table(static_cast<size_t>(kBatch * max_pages_));
        for (int64_t b = 0; b < kBatch; ++b) {
            const int32_t* row = step_.block_table.get() + b * step_.block_table_stride;
            std::copy_n(row, step_.max_pages, table.begin() + b * max_pages_);
        }
        block_table_.upload(table);
        for (size_t i = 0; i < layers_.size(); ++i) {
            upload(rows[i].q, layers_[i].q);
            upload(rows[i].k, layers_[i].k);
            upload(rows[i].v, layers_[i].v);
        }
    }

    // Launches the prompts' step. Without a plan, each call of attention makes one.
    void prefill() const {
        for (const Layer& layer : layers_) {
            pagetile::cache_write(write_params(layer, kPrefill), stream());
            pagetile::paged_attention(attention_params(layer, kPrefill), stream());
        }
    }

    // Launches a step of one token a sequence. The lengths are the same in all layers, so one plan
    // serves them all. No copy, no allocation, no wait: this may be captured.
    void decode() const {
        pagetile::make_plan(plan_params(kDecode), plan_.data(), stream());
        for (const Layer& layer : layers_) {
            pagetile::cache_write(write_params(layer, kDecode), stream());
            pagetile::AttentionParams attention = attention_params(layer, kDecode);
            attention.plan = plan_.data();
            pagetile::paged_attention(attention, stream());
        }
    }

    // out of the last step, [kLayers, tokens, kHeads, kDim]. Waits for it.
    std::vector<float> results() const {
        std::vector<float> all;
        for (const Layer& layer : layers_) {
            const std::vector<float> out = download(layer.out, step_.total_q * kRow);
            all.insert(all.end(), out.begin(), out.end());
        }
        return all;
    }

    // Tokens of each sequence.
    const std::vector<int32_t>& lengths() const { return step_.seqused_k; }

private:
    struct Layer {
        Layer(const Place& place, int64_t element_bytes)
            : k_cache(place, kSlots * kKvRow * element_bytes),
              v_cache(place, kSlots * kKvRow * element_bytes),
              q(place, kMostTokens * kRow * element_bytes),
              k(place, kMostTokens * kKvRow * element_bytes),
              v(place, kMostTokens * kKvRow * element_bytes),
              out(place, kMostTokens * kRow * element_bytes) {
            // NaN. A pool may hold anything: what no sequence has written is never read.
            k_cache.fill(0xFF);
            v_cache.fill(0xFF);
        }

        Memory k_cache, v_cache;  // [pages, page_size, kKvHeads, kDim]
        Memory q, k, v, out;
    };

    pagetile::Stream stream() const { return reinterpret_cast<pagetile::Stream>(place_.stream); }

    // The view of a cache for a write or for attention.
    template <class View>
    View pages(const Memory& cache) const {
        return {
            .data = cache.data(),
            .page_stride = page_size_ * kKvRow,
            .token_stride = kKvRow,
            .head_stride = kDim,
            .chunk = kDim,
            .chunk_stride = kDim,
        };
    }

    pagetile::CacheWriteParams write_params(const Layer& layer, const Shape& shape) const {
        pagetile::CacheWriteParams params;
        params.num_tokens = shape.tokens;
        params.num_kv_heads = kKvHeads;
        params.num_pages = pool_.num_pages();
        params.page_size = page_size_;
        params.dtype = params.cache_dtype = dtype_;
        params.k.data = layer.k.data();
        params.v.data = layer.v.data();
        params.k.row_stride = params.v.row_stride = kKvRow;
        params.k.head_stride = params.v.head_stride = kDim;
        params.k.head_dim = params.v.head_dim = kDim;
        params.k_cache = pages<pagetile::MutableCacheView>(layer.k_cache);
        params.v_cache = pages<pagetile::MutableCacheView>(layer.v_cache);
        params.slot_mapping = slots_.data();
        params.device = place_.device;
        return params;
    }

    pagetile::AttentionParams attention_params(const Layer& layer, const Shape& shape) const {
        pagetile::AttentionParams params;
        params.batch = kBatch;
        params.total_q = shape.tokens;
        params.num_q_heads = kHeads;
        params.num_kv_heads = kKvHeads;
        params.head_dim = params.head_dim_v = kDim;
        params.num_pages = pool_.num_pages();
        params.page_size = page_size_;
        params.max_pages = params.block_table_stride = max_pages_;
        params.max_seqlen_q = shape.max_seqlen_q;
        params.max_seqlen_k = kMostKeys;
        params.q_dtype = params.kv_dtype = params.out_dtype = dtype_;
        params.q = layer.q.data();
        params.q_row_stride = params.out_row_stride = kRow;
        params.q_head_stride = params.out_head_stride = kDim;
        params.cu_seqlens_q = query_offsets(shape);
        params.k_cache = pages<pagetile::CacheView>(layer.k_cache);
        params.v_cache = pages<pagetile::CacheView>(layer.v_cache);
        params.block_table = block_table_.data<int32_t>();
        params.seqused_k = seqused_k_.data<int32_t>();
        params.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kDim));
        params.out = layer.out.data();
        params.workspace = workspace_.data();
        params.workspace_bytes = workspace_.bytes();
        params.device = place_.device;
        return params;
    }

    // What of the calls their schedule depends on.
    pagetile::PlanParams plan_params(const Shape& shape) const {
        pagetile::PlanParams params;
        params.batch = kBatch;
        params.num_q_heads = kHeads;
        params.num_kv_heads = kKvHeads;
        params.head_dim = params.head_dim_v = kDim;
        params.max_seqlen_q = shape.max_seqlen_q;
        params.max_seqlen_k = kMostKeys;
        params.cu_seqlens_q = query_offsets(shape);
        params.seqused_k = seqused_k_.data<int32_t>();
        params.device = place_.device;
        return params;
    }

    // Null says that every sequence has one query.
    const int32_t* query_offsets(const Shape& shape) const {
        return shape.max_seqlen_q == 1 ? nullptr : cu_seqlens_q_.data<int32_t>();
    }

    void upload(const std::vector<float>& from, Memory& to) const {
        if (dtype_ == pagetile::DType::kFloat32) {
            to.upload(from);
            return;
        }
        std::vector<uint16_t> halves(from.size());
        std::ranges::transform(from, halves.begin(), to_bf16);
        to.upload(halves);
    }

    std::vector<float> download(const Memory& from, int64_t count) const {
        std::vector<float> floats(static_cast<size_t>(count));
        if (dtype_ == pagetile::DType::kFloat32) {
            from.download(floats);
            return floats;
        }
        std::vector<uint16_t> halves(floats.size());
        from.download(halves);
        std::ranges::transform(halves, floats.begin(), from_bf16);
        return floats;
    }

    Place place_;
    pagetile::DType dtype_;
    int64_t page_size_;
    int64_t max_pages_;  // of a sequence

    pagetile::BlockPool pool_;
    std::vector<int64_t> sequences_;
    pagetile::Step step_;

    std::vector<Layer> layers_;
    Memory slots_;         // int64 [kMostTokens]
    Memory block_table_;   // int32 [kBatch, max_pages_]
    Memory seqused_k_;     // int32 [kBatch]
    Memory cu_seqlens_q_;  // int32 [kBatch + 1]
    Memory plan_;
    Memory workspace_;
};

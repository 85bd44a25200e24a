#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pagetile {

// A step needs more pages than are free. The pool is as it was before the call.
struct OutOfPagesError : std::runtime_error {
    OutOfPagesError(const std::string& what, int64_t needed_pages, int64_t free_pages)
        : std::runtime_error(what), needed(needed_pages), free(free_pages) {}

    int64_t needed;  // new pages and copied pages of the whole step
    int64_t free;
};

// What one step gives to cache_write and paged_attention. B sequences, T new tokens in all.
struct Step {
    std::vector<int64_t> slot_mapping;  // [T], page * page_size + offset, in the order of the batch
    std::vector<int32_t> seqused_k;     // [B], new tokens included
    std::vector<int32_t> cu_seqlens_q;  // [B + 1]

    // [B, max_pages], row stride block_table_stride; 0 past a sequence's last page. The pool owns
    // the entries: the next append may rewrite them. The memory itself lives as long as any Step
    // that points to it.
    std::shared_ptr<int32_t[]> block_table;
    int64_t block_table_stride = 0;
    int64_t max_pages = 0;  // pages of the longest sequence, at least 1

    // Pages to copy before this step's cache_write: page copy_dst[i] = page copy_src[i], in every
    // layer's caches. No page is both a source and a destination, and no destination comes twice:
    // copy them at once, in any order.
    std::vector<int32_t> copy_src;  // [n]
    std::vector<int32_t> copy_dst;  // [n]

    int64_t total_q = 0;  // T
    int32_t max_seqlen_q = 0;
    int32_t max_seqlen_k = 0;
};

// Host bookkeeping of a paged KV cache: which page holds which tokens of which sequence. It never
// sees the cache.
//
// A sequence is named by an id that is used once: after free() the id is refused for ever. Forked
// sequences share their pages, which are counted; only a shared page that is partly filled is
// copied, when one of its owners appends. Pages are reused last in, first out. A call that throws
// has changed nothing. Not thread-safe.
//
//     pagetile::BlockPool pool(/*num_pages=*/1024, /*page_size=*/16);
//     const std::vector<int64_t> sequences = {pool.allocate(), pool.allocate()};
//     pagetile::Step step;
//     pool.append(sequences, std::vector<int64_t>{17, 5}, step);  // prefill
//     pool.append(sequences, std::vector<int64_t>{1}, step);      // decode: one token each
class BlockPool {
public:
    // num_pages, page_size: 1 .. 2^31 - 1, else std::invalid_argument. Memory grows with the pages
    // in use.
    BlockPool(int64_t num_pages, int64_t page_size);

    BlockPool(BlockPool&&) noexcept = default;
    BlockPool& operator=(BlockPool&&) noexcept = default;

    // A new sequence without tokens or pages.
    int64_t allocate();

    // A new sequence with the tokens of this one, on the same pages.
    int64_t fork(int64_t sequence);

    // Ends a sequence; its pages return to the pool, save those that a fork still holds.
    void free(int64_t sequence);

    // Makes room for num_tokens[i] more tokens of sequences[i] and describes the step. num_tokens
    // holds a count for each sequence, or a single one for all; 0 is allowed.
    // Costs O(T + B), and O(pages) for each row of the block table that does not hold the sequence
    // it held in the last step: keep sequences at their rows. The table doubles when it is too
    // small; that step writes every row. A Step may be used again; in a steady batch that allocates
    // nothing. After an exception it holds no step. Throws OutOfPagesError, or
    // std::invalid_argument for an id that is not live or comes twice, a count below 0, a sequence
    // beyond 2^31 - 1 tokens, or a step beyond 2^31 - 1 tokens.
    void append(
        std::span<const int64_t> sequences, std::span<const int64_t> num_tokens, Step& step
    );

    // Tokens of a sequence.
    int64_t length(int64_t sequence) const;

    // Pages of a sequence, in order; valid until the next call that is not const.
    std::span<const int32_t> pages(int64_t sequence) const;

    int64_t num_pages() const { return num_pages_; }

    int64_t page_size() const { return page_size_; }

    int64_t num_free_pages() const { return num_pages_ - num_used_pages_; }

    // Live sequences.
    int64_t num_sequences() const { return num_sequences_; }

private:
    struct Sequence {
        std::vector<int32_t> pages;  // ceil(length / page_size)
        int64_t last_append = 0;     // number of the last append that named it: finds duplicates
        int64_t generation = 0;      // the high half of its id: how often the slot was freed
        int32_t length = 0;
        bool live = false;
    };

    // What a row of the block table holds, so that the next step writes only what changed.
    struct Row {
        int64_t sequence = -1;
        int32_t length = 0;     // of the sequence when the row was written
        int32_t num_pages = 0;  // entries written; the rest of the row is 0
    };

    struct StepSizes {
        int64_t total_q = 0;
        int64_t max_pages = 1;
        int64_t new_pages = 0;  // copies included
        int64_t copies = 0;
    };

    const Sequence& find(int64_t sequence, const char* function, int64_t index = -1) const;
    StepSizes check_step(std::span<const int64_t> sequences, std::span<const int64_t> num_tokens);
    int64_t count_copies() noexcept;
    void reserve_step(
        std::span<const int64_t> sequences,
        std::span<const int64_t> num_tokens,
        const StepSizes& sizes,
        Step& step
    );
    void reserve_table(int64_t rows, int64_t max_pages);
    int32_t take_page() noexcept;
    void release_page(int32_t page) noexcept;
    void write_row(Row& row, int32_t* entries, int64_t id, const Sequence& sequence) const noexcept;

    int64_t num_pages_;
    int64_t page_size_;
    int64_t num_used_pages_ = 0;
    int64_t num_sequences_ = 0;
    int64_t num_appends_ = 0;

    std::vector<int32_t> references_;  // [pages ever used], owners of a page
    std::vector<int32_t> free_pages_;  // a stack; pages never used yet are not on it
    std::vector<Sequence> sequences_;  // by slot, the low half of an id
    std::vector<int32_t> free_slots_;  // a stack
    std::vector<int32_t>
        shared_;  // scratch of a step: partly filled last pages with several owners, once an owner

    std::shared_ptr<int32_t[]> table_;  // [rows, table_stride_]
    int64_t table_stride_ = 0;
    std::vector<Row> rows_;
};

}  // namespace pagetile

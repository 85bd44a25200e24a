#include "pagetile/block_pool.h"

#include "pagetile/error.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <utility>

namespace pagetile {

namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int kSlotBits = 32;
constexpr int64_t kSlotMask = (int64_t{1} << kSlotBits) - 1;
constexpr int64_t kRowAlignment = 16;  // entries: a row starts a cache line

int64_t make_id(int64_t slot, int64_t generation) { return generation << kSlotBits | slot; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// reserve() alone would give up geometric growth.
template <class T>
void grow(std::vector<T>& vector, int64_t size) {
    if (size > static_cast<int64_t>(vector.capacity())) {
        vector.reserve(std::max(static_cast<size_t>(size), 2 * vector.capacity()));
    }
}

// One count may stand for all sequences.
int64_t count_at(std::span<const int64_t> num_tokens, size_t i) {
    return num_tokens[num_tokens.size() == 1 ? 0 : i];
}

void check_size(const char* name, int64_t size) {
    const bool fits = size >= 1 && size <= kMaxInt32;
    check(fits, "BlockPool: ", name, " must be in [1, ", kMaxInt32, "], got ", size);
}

// In append's messages: "BlockPool.append: num_tokens[3]".
std::string count_name(size_t i) { return message("BlockPool.append: num_tokens[", i, "]"); }

[[noreturn]] void throw_duplicate(std::span<const int64_t> sequences, size_t i) {
    const auto first = std::find(sequences.begin(), sequences.end(), sequences[i]);
    const std::string where = message(first - sequences.begin(), " and ", i);
    const char* text = "BlockPool.append: sequences must name a sequence once, got ";
    throw std::invalid_argument(message(text, sequences[i], " at ", where));
}

}  // namespace

BlockPool::BlockPool(int64_t num_pages, int64_t page_size)
    : num_pages_(num_pages), page_size_(page_size) {
    check_size("num_pages", num_pages);
    check_size("page_size", page_size);
}

int64_t BlockPool::allocate() {
    if (free_slots_.empty()) {
        const bool left = sequences_.size() < static_cast<size_t>(kMaxInt32);
        check(left, "BlockPool.allocate: no sequence ids are left");
        grow(sequences_, static_cast<int64_t>(sequences_.size()) + 1);
        free_slots_.reserve(sequences_.capacity());  // free() must not allocate
        free_slots_.push_back(static_cast<int32_t>(sequences_.size()));
        sequences_.emplace_back();
    }
    const int32_t slot = free_slots_.back();
    free_slots_.pop_back();
    sequences_[slot].live = true;
    ++num_sequences_;
    return make_id(slot, sequences_[slot].generation);
}

int64_t BlockPool::fork(int64_t sequence) {
    const Sequence& parent = find(sequence, "fork");
    std::vector<int32_t> pages = parent.pages;
    const int32_t length = parent.length;
    const int64_t id = allocate();  // may move the parent
    for (const int32_t page : pages) {
        ++references_[page];
    }
    Sequence& child = sequences_[id & kSlotMask];
    child.pages = std::move(pages);
    child.length = length;
    return id;
}

void BlockPool::free(int64_t id) {
    find(id, "free");
    const auto slot = static_cast<int32_t>(id & kSlotMask);
    Sequence& sequence = sequences_[slot];
    // From the back, so that the next sequence gets the pages in the same order.
    for (auto page = sequence.pages.rbegin(); page != sequence.pages.rend(); ++page) {
        release_page(*page);
    }
    sequence.pages = {};
    sequence.length = 0;
    sequence.live = false;
    --num_sequences_;
    ++sequence.generation;
    if (sequence.generation <= kMaxInt32) {  // else the slot retires: an id never comes twice
        free_slots_.push_back(slot);
    }
}

int64_t BlockPool::length(int64_t sequence) const { return find(sequence, "length").length; }

std::span<const int32_t> BlockPool::pages(int64_t sequence) const {
    return find(sequence, "pages").pages;
}

void BlockPool::append(
    std::span<const int64_t> sequences, std::span<const int64_t> num_tokens, Step& step
) {
    const StepSizes sizes = check_step(sequences, num_tokens);
    reserve_step(sequences, num_tokens, sizes, step);

    // Nothing below throws or allocates.
    int64_t* slots = step.slot_mapping.data();
    int32_t cu_seqlen = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
        Sequence& sequence = sequences_[sequences[i] & kSlotMask];
        const auto count = static_cast<int32_t>(count_at(num_tokens, i));
        const int32_t begin = sequence.length;
        const int32_t end = begin + count;
        const auto old_pages = static_cast<int64_t>(sequence.pages.size());
        bool pages_changed = false;

        // Copy-on-write
        if (count > 0 && begin < old_pages * page_size_ && references_[sequence.pages.back()] > 1) {
            const int32_t source = sequence.pages.back();
            --references_[source];
            sequence.pages.back() = take_page();
            step.copy_src.push_back(source);
            step.copy_dst.push_back(sequence.pages.back());
            pages_changed = true;
        }

        // New pages
        while (static_cast<int64_t>(sequence.pages.size()) * page_size_ < end) {
            sequence.pages.push_back(take_page());
            pages_changed = true;
        }
        sequence.length = end;

        // Slots: from the partly filled page on, one run a page.
        size_t page_idx = begin < old_pages * page_size_ ? old_pages - 1 : old_pages;
        for (int64_t token = begin; token < end; ++page_idx) {
            const int64_t first_token = static_cast<int64_t>(page_idx) * page_size_;
            const int64_t run_end = std::min<int64_t>(end, first_token + page_size_);
            const int64_t first_slot = sequence.pages[page_idx] * page_size_ - first_token;
            for (; token < run_end; ++token) {
                *slots++ = first_slot + token;
            }
        }

        // Block table
        Row& row = rows_[i];
        if (row.sequence == sequences[i] && row.length == begin && !pages_changed) {
            row.length = end;
        } else {
            write_row(
                row, table_.get() + static_cast<int64_t>(i) * table_stride_, sequences[i], sequence
            );
        }

        cu_seqlen += count;
        step.cu_seqlens_q[i + 1] = cu_seqlen;
        step.seqused_k[i] = end;
        step.max_seqlen_q = std::max(step.max_seqlen_q, count);
        step.max_seqlen_k = std::max(step.max_seqlen_k, end);
    }
    step.block_table = table_;
    step.block_table_stride = table_stride_;
    step.max_pages = sizes.max_pages;
    step.total_q = sizes.total_q;
}

const BlockPool::Sequence& BlockPool::find(int64_t id, const char* function, int64_t index) const {
    const int64_t slot = id & kSlotMask;
    const int64_t generation = id >> kSlotBits;
    const bool known = id >= 0 && slot < static_cast<int64_t>(sequences_.size());
    if (known && sequences_[slot].live && sequences_[slot].generation == generation) [[likely]] {
        return sequences_[slot];
    }
    const std::string name = index < 0 ? "sequence" : message("sequences[", index, "]");
    const bool freed = known && generation < sequences_[slot].generation;
    const std::string got = message(id, freed ? " (freed)" : " (never allocated)");
    const char* expected = " must be a live sequence of this pool, got ";
    throw std::invalid_argument(message("BlockPool.", function, ": ", name, expected, got));
}

// Checks everything that can be wrong with a step. Changes nothing that a caller could see.
BlockPool::StepSizes BlockPool::check_step(
    std::span<const int64_t> sequences, std::span<const int64_t> num_tokens
) {
    if (num_tokens.size() != sequences.size() && num_tokens.size() != 1) {
        const char* expected =
            "BlockPool.append: num_tokens must be one count, or one for each of ";
        check(false, expected, sequences.size(), " sequences, got ", num_tokens.size());
    }
    StepSizes sizes;
    shared_.clear();
    ++num_appends_;
    for (size_t i = 0; i < sequences.size(); ++i) {
        const int64_t id = sequences[i];
        find(id, "append", static_cast<int64_t>(i));
        Sequence& sequence = sequences_[id & kSlotMask];
        if (sequence.last_append == num_appends_) [[unlikely]] {
            throw_duplicate(sequences, i);
        }
        sequence.last_append = num_appends_;

        const int64_t count = count_at(num_tokens, i);
        const int64_t room = kMaxInt32 - sequence.length;
        if (count < 0) [[unlikely]] {
            check(false, count_name(i), " must be >= 0, got ", count);
        }
        if (count > room) [[unlikely]] {
            const std::string full = message(sequence.length, " of ", kMaxInt32, " tokens");
            const std::string most = message(room, " (sequence ", id, " has ", full, ")");
            check(false, count_name(i), " must be at most ", most, ", got ", count);
        }

        const int64_t end = sequence.length + count;
        auto pages = static_cast<int64_t>(sequence.pages.size());
        const bool partly_filled = sequence.length < pages * page_size_;
        if (count > 0 && partly_filled && references_[sequence.pages.back()] > 1) {
            shared_.push_back(sequence.pages.back());
        }
        if (end > pages * page_size_) {
            sizes.new_pages += ceil_div(end, page_size_) - pages;
            pages = ceil_div(end, page_size_);
        }
        sizes.max_pages = std::max(sizes.max_pages, pages);
        sizes.total_q += count;
    }
    if (sizes.total_q > kMaxInt32) {
        const char* expected = "BlockPool.append: num_tokens must add up to at most ";
        check(false, expected, kMaxInt32, " (cu_seqlens_q is int32), got ", sizes.total_q);
    }
    sizes.copies = count_copies();
    sizes.new_pages += sizes.copies;
    if (const int64_t free = num_free_pages(); sizes.new_pages > free) {
        const std::string need = message(sizes.new_pages, " needed, ", free, " free of ");
        const std::string all = message(num_pages_, " (page_size ", page_size_, ")");
        const char* text = "BlockPool.append: out of pages: ";
        throw OutOfPagesError(message(text, need, all), sizes.new_pages, free);
    }
    return sizes;
}

// The last owner of a page that appends keeps it: with all of n owners in the step, n - 1 copies.
int64_t BlockPool::count_copies() noexcept {
    int64_t copies = 0;
    for (const int32_t page : shared_) {
        if (references_[page] > 1) {
            --references_[page];
            shared_[copies++] = page;
        }
    }
    for (int64_t i = 0; i < copies; ++i) {
        ++references_[shared_[i]];
    }
    return copies;
}

// All the memory that the step needs, so that it cannot fail half way.
void BlockPool::reserve_step(
    std::span<const int64_t> sequences,
    std::span<const int64_t> num_tokens,
    const StepSizes& sizes,
    Step& step
) {
    const auto batch = static_cast<int64_t>(sequences.size());
    for (int64_t i = 0; i < batch; ++i) {
        Sequence& sequence = sequences_[sequences[i] & kSlotMask];
        const int64_t end = sequence.length + count_at(num_tokens, i);
        if (end > static_cast<int64_t>(sequence.pages.size()) * page_size_) {
            grow(sequence.pages, ceil_div(end, page_size_));
        }
    }
    const int64_t never_used = sizes.new_pages - static_cast<int64_t>(free_pages_.size());
    if (never_used > 0) {
        grow(references_, static_cast<int64_t>(references_.size()) + never_used);
        free_pages_.reserve(references_.capacity());  // free() must not allocate
    }
    reserve_table(batch, sizes.max_pages);

    step.slot_mapping.resize(sizes.total_q);
    step.seqused_k.resize(batch);
    step.cu_seqlens_q.resize(batch + 1);
    step.copy_src.reserve(sizes.copies);
    step.copy_dst.reserve(sizes.copies);
    step.copy_src.clear();
    step.copy_dst.clear();
    step.cu_seqlens_q[0] = 0;
    step.max_seqlen_q = 0;
    step.max_seqlen_k = 0;
}

// A larger table starts empty: old views keep the old memory, and every row is written anew.
void BlockPool::reserve_table(int64_t rows, int64_t max_pages) {
    const auto old_rows = static_cast<int64_t>(rows_.size());
    if (rows <= old_rows && max_pages <= table_stride_) {
        return;
    }
    rows = rows > old_rows ? std::max(rows, 2 * old_rows) : old_rows;
    int64_t stride = table_stride_;
    if (max_pages > stride) {
        stride = ceil_div(std::max(max_pages, 2 * stride), kRowAlignment) * kRowAlignment;
    }
    // calloc: a large table takes memory only where it is written.
    auto* entries =
        static_cast<int32_t*>(std::calloc(static_cast<size_t>(rows) * stride, sizeof(int32_t)));
    if (entries == nullptr) {
        throw std::bad_alloc();
    }
    std::shared_ptr<int32_t[]> table(entries, [](int32_t* memory) { std::free(memory); });
    std::vector<Row> new_rows(rows);
    table_ = std::move(table);
    rows_ = std::move(new_rows);
    table_stride_ = stride;
}

int32_t BlockPool::take_page() noexcept {
    ++num_used_pages_;
    if (free_pages_.empty()) {
        references_.push_back(1);
        return static_cast<int32_t>(references_.size()) - 1;
    }
    const int32_t page = free_pages_.back();
    free_pages_.pop_back();
    references_[page] = 1;
    return page;
}

void BlockPool::release_page(int32_t page) noexcept {
    if (--references_[page] == 0) {
        free_pages_.push_back(page);
        --num_used_pages_;
    }
}

// A page that was full when the row was written has not changed since: only the rest is copied.
void BlockPool::write_row(
    Row& row, int32_t* entries, int64_t id, const Sequence& sequence
) const noexcept {
    const int64_t first = row.sequence == id ? row.length / page_size_ : 0;
    const auto num_pages = static_cast<int32_t>(sequence.pages.size());
    std::copy(sequence.pages.begin() + first, sequence.pages.end(), entries + first);
    if (row.num_pages > num_pages) {
        std::fill(entries + num_pages, entries + row.num_pages, 0);
    }
    row = {.sequence = id, .length = sequence.length, .num_pages = num_pages};
}

}  // namespace pagetile

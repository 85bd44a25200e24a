// Cuts the batch into tiles of packed query rows, long sequences into splits of their keys, and
// runs them on all threads.

#include "attention/cpu/attention_cpu.h"

#include "attention/seqlen.h"
#include "common/cpu_kernels.h"
#include "common/parallel.h"

#include <algorithm>
#include <vector>

namespace pagetile::cpu {
namespace {

// Below this many multiply-adds a call is over before a second thread has started (about 20 us).
constexpr int64_t kSerialWork = 1 << 19;
// A split shorter than this costs more in partial results than it wins.
constexpr int64_t kMinSplitTiles = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::vector<AttentionTile> cut_into_tiles(const AttentionParams& params) {
    const int64_t group = params.num_q_heads / params.num_kv_heads;
    std::vector<AttentionTile> tiles;
    tiles.reserve(static_cast<size_t>(params.batch * params.num_kv_heads));
    for (int64_t b = 0; b < params.batch; ++b) {
        const SequenceLengths lengths = sequence_lengths(params, b);
        const int64_t rows = lengths.q_len * group;
        // The last rows of a causal sequence see the most keys: they go first, so that threads end
        // together.
        for (int64_t end = rows; end > 0;) {
            const int64_t begin = (end - 1) / kTileM * kTileM;
            for (int64_t head = 0; head < params.num_kv_heads; ++head) {
                tiles.push_back({
                    .batch_idx = b,
                    .kv_head = head,
                    .q_begin = lengths.q_begin,
                    .q_len = lengths.q_len,
                    .kv_len = lengths.kv_len,
                    .row_begin = begin,
                    .row_end = end,
                    .key_begin = 0,
                    .key_end = lengths.kv_len,
                    .partial = nullptr,
                });
            }
            end = begin;
        }
    }
    return tiles;
}

bool is_small(const AttentionParams& params, const std::vector<AttentionTile>& tiles) {
    int64_t work = 0;
    for (const AttentionTile& tile : tiles) {
        work +=
            (tile.row_end - tile.row_begin) * tile.kv_len * (params.head_dim + params.head_dim_v);
        if (work > kSerialWork) {
            return false;
        }
    }
    return true;
}

int64_t choose_splits(const AttentionParams& params, int64_t num_tiles, bool small) {
    if (params.batch_invariant || num_tiles == 0) {
        return 1;
    }
    if (params.num_splits > 0) {
        return params.num_splits;
    }
    const int64_t threads = max_threads();
    // Two pieces a thread even out; with that many tiles, splits win nothing.
    return small ? 1 : std::max<int64_t>(1, 2 * threads / num_tiles);
}

void attend(const AttentionParams& params, const AttentionTile& tile) {
    cpu_kernels().attend(
        params, tile, static_cast<float*>(thread_scratch(attend_scratch_bytes(params)))
    );
}

// Runs every tile as several splits and combines them in split order.
void attend_split(
    const AttentionParams& params, const std::vector<AttentionTile>& tiles, int64_t wanted
) {
    struct Group {
        int64_t first_piece;
        int64_t num_splits;
    };

    std::vector<AttentionTile> pieces;
    std::vector<Group> groups;
    for (const AttentionTile& tile : tiles) {
        const int64_t key_tiles = ceil_div(tile.kv_len, kTileN);
        const int64_t most = params.num_splits > 0 ? key_tiles : key_tiles / kMinSplitTiles;
        const int64_t splits = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1));
        const int64_t step = std::max<int64_t>(ceil_div(key_tiles, splits), 1) * kTileN;
        groups.push_back(
            {.first_piece = static_cast<int64_t>(pieces.size()), .num_splits = splits}
        );
        for (int64_t split = 0; split < splits; ++split) {
            AttentionTile piece = tile;
            piece.key_begin = std::min(split * step, tile.kv_len);
            piece.key_end = std::min(piece.key_begin + step, tile.kv_len);
            pieces.push_back(piece);
        }
    }
    const int64_t stride = kTileM * partial_row_size(params);
    std::vector<float> partials(pieces.size() * static_cast<size_t>(stride));
    for (size_t i = 0; i < pieces.size(); ++i) {
        pieces[i].partial = partials.data() + i * static_cast<size_t>(stride);
    }
    parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t i) {
        attend(params, pieces[static_cast<size_t>(i)]);
    });
    parallel_for(static_cast<int64_t>(groups.size()), 8, [&](int64_t i) {
        const Group& group = groups[static_cast<size_t>(i)];
        const float* partial = partials.data() + group.first_piece * stride;
        cpu_kernels().combine(
            params, tiles[static_cast<size_t>(i)], partial, group.num_splits, stride
        );
    });
}

}  // namespace

void paged_attention(const AttentionParams& params) {
    const std::vector<AttentionTile> tiles = cut_into_tiles(params);
    const auto num_tiles = static_cast<int64_t>(tiles.size());
    const bool small = is_small(params, tiles);
    const int64_t splits = choose_splits(params, num_tiles, small);
    if (splits > 1) {
        attend_split(params, tiles, splits);
    } else {
        const int64_t grain = small ? num_tiles : 1;
        parallel_for(num_tiles, grain, [&](int64_t i) {
            attend(params, tiles[static_cast<size_t>(i)]);
        });
    }
}

void merge_states(const MergeStatesParams& params) {
    const int64_t elements_per_token = std::max<int64_t>(params.num_heads * params.head_dim, 1);
    const int64_t tokens_per_chunk = std::max<int64_t>((1 << 14) / elements_per_token, 1);
    parallel_for(ceil_div(params.num_tokens, tokens_per_chunk), 1, [&](int64_t chunk) {
        const int64_t begin = chunk * tokens_per_chunk;
        cpu_kernels().merge_states(
            params, begin, std::min(begin + tokens_per_chunk, params.num_tokens)
        );
    });
}

}  // namespace pagetile::cpu

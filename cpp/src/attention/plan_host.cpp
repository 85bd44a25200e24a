// The plan, serially: for tensors on the CPU, and what the plan kernel is tested against.

#include "attention/plan_cuts.h"

#include <algorithm>
#include <vector>

namespace pagetile {
namespace {

// Returns what the prefill kernel has of the multiprocessors.
int32_t cut(
    PlanShape shape,
    const int32_t* cu_seqlens_q,
    const int32_t* seqused_k,
    const int32_t* cu_seqlens_k,
    LaneWork* work
) {
    const auto visit_all = [&](const auto& visit) {
        for (int32_t b = 0; b < shape.batch; ++b) {
            visit(b, plan_lengths(shape, cu_seqlens_q, seqused_k, cu_seqlens_k, b));
        }
    };
    PlanTotals totals = {0, 0, 0, 0};
    visit_all([&](int32_t, PlanLengths lengths) {
        totals = add_totals(totals, sequence_totals(shape, lengths));
    });
    for (int32_t lane = 0; lane < shape.lanes; ++lane) {
        clear_lane(shape, work, lane);
    }
    const SmShare share = share_sms(shape, totals);
    shape.lanes = share.lanes;

    const auto cut_line = [&](Cut cut) {
        const int64_t share = fair_share(shape, totals, cut);
        std::vector<int64_t> moved(static_cast<size_t>(shape.lanes), totals.cost);
        for (int32_t lane = 0; lane < shape.lanes; ++lane) {
            clear_lane(shape, work, lane);
        }
        int64_t first = 0;
        visit_all([&](int32_t b, PlanLengths lengths) {
            cut_sequence(shape, cut, share, first, b, lengths, work, moved.data());
            first += sequence_totals(shape, lengths).cost;
        });
        int64_t slowest = 0;
        for (size_t lane = 0; lane < moved.size(); ++lane) {
            const int64_t end = lane + 1 < moved.size() ? moved[lane + 1] : totals.cost;
            slowest = std::max(slowest, end - moved[lane]);
        }
        return slowest;
    };

    if (shape.piece_units > 0) {
        cut_line(Cut::kPieces);
        return share.prefill_ctas;
    }
    const bool may_cut_evenly = shape.max_splits == 0 || shape.max_splits > 2;
    const int64_t even_time = fair_share(shape, totals, Cut::kEven) + 2 * shape.split_cost;
    if (totals.tiles > shape.lanes) {
        if (cut_line(Cut::kWhole) > even_time && may_cut_evenly) {
            cut_line(Cut::kEven);
        }
        return share.prefill_ctas;
    }

    // No more tiles than lanes: the largest tile gets as many pieces as pay and fit.
    std::vector<int32_t> units;
    visit_all([&](int32_t, PlanLengths lengths) {
        for (int32_t head = 0; head < shape.heads_per_chain; ++head) {
            for (int32_t m = 0; m < num_row_tiles(shape, lengths.q_len); ++m) {
                const UnitSpan span = tile_units(shape, lengths.q_len, lengths.kv_len, m);
                units.push_back(span.end - span.begin);
            }
        }
    });
    int32_t best = 1;
    for (int32_t pieces = 2; pieces <= most_pieces(shape); ++pieces) {
        int64_t used = 0;
        for (const int32_t tile : units) {
            used += dealt_pieces(tile, totals.max_units, pieces);
        }
        if (used <= shape.lanes && dealt_time(shape, totals.max_units, pieces) <
                                       dealt_time(shape, totals.max_units, best)) {
            best = pieces;
        }
    }
    if (may_cut_evenly && even_time < dealt_time(shape, totals.max_units, best)) {
        cut_line(Cut::kEven);
        return share.prefill_ctas;
    }
    for (int32_t lane = 0; lane < shape.lanes; ++lane) {
        clear_lane(shape, work, lane);
    }
    int32_t lane = 0;
    visit_all([&](int32_t b, PlanLengths lengths) {
        deal_sequence(shape, totals.max_units, best, lane, b, lengths, work);
        lane += dealt_lanes(shape, totals.max_units, best, lengths);
    });
    return share.prefill_ctas;
}

}  // namespace

void plan_on_host(
    const PlanShape& shape,
    const int32_t* cu_seqlens_q,
    const int32_t* seqused_k,
    const int32_t* cu_seqlens_k,
    LaneWork* work
) {
    const int32_t prefill_ctas = cut(shape, cu_seqlens_q, seqused_k, cu_seqlens_k, work);
    if (shape.num_sms > 0) {
        *reinterpret_cast<PlanTail*>(work + shape.lanes) = {prefill_ctas, {}};
    }
    for (int32_t lane = 0; lane < shape.lanes; ++lane) {
        const int32_t b = work[lane].begin.batch_idx;
        const PlanLengths lengths =
            b < shape.batch ? plan_lengths(shape, cu_seqlens_q, seqused_k, cu_seqlens_k, b)
                            : PlanLengths{};
        work_out_first(shape, work[lane], lane, lengths);
    }
}

}  // namespace pagetile

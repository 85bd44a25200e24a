#include "plan.h"

#include "attention/dispatch.h"
#include "attention/plan_cuts.h"
#include "attention/prefill_schedule.h"
#include "define.h"
#include "pagetile/error.h"
#include "tensor.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace pagetile {
namespace {

constexpr const char* kMakePlan = "make_plan";
constexpr const char* kWorkspaceSize = "workspace_size";
constexpr const char* kAttentionPlan = "attention_plan";

constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

const char* truth(bool value) { return value ? "True" : "False"; }

// Tokens that a query sees around its own place, however the caller said it.
struct Visible {
    int64_t left;
    int64_t right;

    explicit Visible(const PlanParams& params)
        : left(bounded(params.window_left)),
          right(params.causal ? 0 : bounded(params.window_right)) {}

    bool operator==(const Visible&) const = default;

private:
    static int64_t bounded(int64_t window) { return window > kMaxLength ? -1 : window; }
};

std::string mask_text(const PlanParams& params) {
    return message(
        "causal ",
        truth(params.causal),
        " and window (",
        params.window_left,
        ", ",
        params.window_right,
        ")"
    );
}

// Without it nothing says how many pieces a sequence may have.
void check_pieces_are_bounded(const char* function, const PlanParams& params) {
    check(
        !params.batch_invariant || params.max_seqlen_k > 0,
        function,
        ": max_seqlen_k must be > 0 with batch_invariant, got ",
        params.max_seqlen_k
    );
}

// [B] and, unless every sequence has one query, [B + 1].
void require_lengths(const Tensor& seqused_k, const Tensor& cu_seqlens_q) {
    require_tensors(seqused_k, {}, {&cu_seqlens_q});
    seqused_k.require_dtype({DType::kInt32});
    seqused_k.require_ndim(1, "[B]");
    seqused_k.require_dense_last_dim();
    if (cu_seqlens_q.given()) {
        cu_seqlens_q.require_dtype({DType::kInt32});
        cu_seqlens_q.require_shape({seqused_k.size(0) + 1}, "(B + 1,)");
        cu_seqlens_q.require_dense_last_dim();
    }
}

PlanParams without_tensors(PlanParams params) {
    params.cu_seqlens_q = nullptr;
    params.seqused_k = nullptr;
    params.cu_seqlens_k = nullptr;
    return params;
}

Plan allocate_plan(
    const PlanParams& params, int64_t page_size, int64_t bytes, nb::handle allocate
) {
    static_assert(sizeof(LaneWork) % sizeof(int32_t) == 0);
    Plan plan = {
        .params = without_tensors(params),
        .has_cu_seqlens_q = params.cu_seqlens_q != nullptr,
        .page_size = page_size,
        .buffer = allocate(bytes / static_cast<int64_t>(sizeof(int32_t))),
    };
    const Tensor buffer(kMakePlan, "the plan's buffer", plan.buffer, Access::kWrite);
    plan.data = buffer.data();
    return plan;
}

// `allocate(n)` gives a writable int32 tensor of n elements in seqused_k's framework, on its
// device.
nb::object make_plan_binding(
    nb::handle seqused_k_object,
    nb::handle cu_seqlens_q_object,
    int64_t max_seqlen_q,
    int64_t max_seqlen_k,
    int64_t num_q_heads,
    int64_t num_kv_heads,
    int64_t head_dim,
    int64_t head_dim_v,
    int64_t page_size,
    bool causal,
    int64_t window_left,
    int64_t window_right,
    int64_t num_splits,
    bool batch_invariant,
    bool fp8_products,
    nb::handle out_object,
    nb::handle allocate,
    nb::handle stream
) {
    const Tensor seqused_k(kMakePlan, "seqused_k", seqused_k_object);
    const Tensor cu_seqlens_q(kMakePlan, "cu_seqlens_q", cu_seqlens_q_object);
    require_lengths(seqused_k, cu_seqlens_q);
    PlanParams params = {
        .batch = seqused_k.size(0),
        .num_q_heads = num_q_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .head_dim_v = head_dim_v,
        .max_seqlen_q = max_seqlen_q,
        .max_seqlen_k = max_seqlen_k,
        .cu_seqlens_q = cu_seqlens_q.data_as<const int32_t>(),
        .seqused_k = seqused_k.data_as<const int32_t>(),
        .causal = causal,
        .window_left = window_left,
        .window_right = window_right,
        .num_splits = num_splits,
        .batch_invariant = batch_invariant,
        .fp8_products = fp8_products,
        .device = seqused_k.device(),
    };
    const int64_t bytes = plan_size(params);  // throws on what does not fit
    check_pieces_are_bounded(kMakePlan, params);
    check(page_size > 0, kMakePlan, ": page_size must be > 0, got ", page_size);

    nb::object result = nb::borrow(out_object);
    const Plan* plan = parse_plan(kMakePlan, "out", out_object);
    if (plan != nullptr) {
        plan->require_fits(kMakePlan, "out", params, page_size);
        params.max_seqlen_q = plan->params.max_seqlen_q;
        params.max_seqlen_k = plan->params.max_seqlen_k;
    } else {
        result = nb::cast(allocate_plan(params, page_size, bytes, allocate));
        plan = nb::inst_ptr<Plan>(result);
    }
    const Stream on_stream = resolve_stream(kMakePlan, stream, seqused_k_object, params.device);
    {
        const nb::gil_scoped_release release;
        make_plan(params, plan->data, on_stream);
    }
    return result;
}

int64_t workspace_size_binding(
    int64_t max_seqlen_q,
    int64_t max_seqlen_k,
    int64_t num_q_heads,
    int64_t num_kv_heads,
    int64_t head_dim,
    int64_t head_dim_v,
    bool batch_invariant,
    bool on_cuda,
    int32_t device_index
) {
    static constexpr int32_t kGiven = 0;  // calls with cu_seqlens_q need no less than those without
    const PlanParams params = {
        .num_q_heads = num_q_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .head_dim_v = head_dim_v,
        .max_seqlen_q = max_seqlen_q,
        .max_seqlen_k = max_seqlen_k,
        .cu_seqlens_q = &kGiven,
        .batch_invariant = batch_invariant,
        .device = {.kind = on_cuda ? DeviceKind::kCuda : DeviceKind::kCpu, .index = device_index},
    };
    check_pieces_are_bounded(kWorkspaceSize, params);
    return workspace_size(params);
}

nb::tuple position(const Position& place) {
    return nb::make_tuple(place.batch_idx, place.head, place.row_tile, place.unit);
}

nb::dict lane_dict(const LaneWork& work) {
    nb::dict lane;
    lane["begin"] = position(work.begin);
    lane["end"] = position(work.end);
    lane["first_lane"] = work.cuts.first_lane;
    lane["first_piece"] = work.cuts.first_piece;
    lane["first_pieces"] = work.cuts.first_pieces;
    lane["last_pieces"] = work.cuts.last_pieces;
    nb::list words;  // all of it, as it lies in a plan's buffer
    const auto* first = reinterpret_cast<const int32_t*>(&work);
    for (size_t i = 0; i < sizeof(LaneWork) / sizeof(int32_t); ++i) {
        words.append(first[i]);
    }
    lane["words"] = words;
    return lane;
}

nb::dict shape_dict(const PlanShape& shape) {
    nb::dict result;
    result["batch"] = shape.batch;
    result["max_q_len"] = shape.max_q_len;
    result["group"] = shape.group;
    result["rows"] = shape.rows;
    result["chains"] = shape.chains;
    result["heads_per_chain"] = shape.heads_per_chain;
    result["long_rows"] = shape.long_rows;
    result["num_sms"] = shape.num_sms;
    result["unit_time"] = shape.unit_time;
    result["pair_time"] = shape.pair_time;
    result["lanes"] = shape.lanes;
    result["in_clusters"] = shape.in_clusters;
    result["window_left"] = shape.window_left;
    result["window_right"] = shape.window_right;
    result["max_splits"] = shape.max_splits;
    result["piece_units"] = shape.piece_units;
    result["max_pieces"] = shape.max_pieces;
    result["tile_cost"] = shape.tile_cost;
    result["split_cost"] = shape.split_cost;
    return result;
}

// The schedule that a GPU with so many multiprocessors would get, lane by lane, and its shape. From
// tensors on the CPU; launches nothing.
nb::tuple attention_plan(
    nb::handle cu_seqlens_q_object,
    nb::handle seqused_k_object,
    int64_t num_q_heads,
    int64_t num_kv_heads,
    int64_t head_dim,
    std::optional<int64_t> head_dim_v,
    int64_t max_seqlen_q,
    int64_t max_seqlen_k,
    bool causal,
    int64_t window_left,
    int64_t window_right,
    int64_t num_splits,
    bool batch_invariant,
    int num_sms,
    bool has_clusters,
    bool has_wgmma,
    bool has_prefill
) {
    const Tensor seqused_k(kAttentionPlan, "seqused_k", seqused_k_object);
    const Tensor cu_seqlens_q(kAttentionPlan, "cu_seqlens_q", cu_seqlens_q_object);
    require_lengths(seqused_k, cu_seqlens_q);
    const PlanParams params = {
        .batch = seqused_k.size(0),
        .num_q_heads = num_q_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .head_dim_v = head_dim_v.value_or(head_dim),
        .max_seqlen_q = max_seqlen_q,
        .max_seqlen_k = max_seqlen_k,
        .cu_seqlens_q = cu_seqlens_q.data_as<const int32_t>(),
        .seqused_k = seqused_k.data_as<const int32_t>(),
        .causal = causal,
        .window_left = window_left,
        .window_right = window_right,
        .num_splits = num_splits,
        .batch_invariant = batch_invariant,
        .device = seqused_k.device(),
    };
    check(params.device.kind == DeviceKind::kCpu, kAttentionPlan, ": seqused_k must be on the CPU");
    plan_size(params);  // throws on what does not fit
    check(num_sms > 0, kAttentionPlan, ": num_sms must be > 0, got ", num_sms);
    const Gpu gpu = {num_sms, has_clusters, has_wgmma, has_prefill};
    const PlanShape shape = plan_shape(params, gpu);
    std::vector<LaneWork> work(static_cast<size_t>(shape.lanes) + 1);  // and the tail
    plan_on_host(shape, params.cu_seqlens_q, params.seqused_k, nullptr, work.data());
    nb::list lanes;
    for (int32_t lane = 0; lane < shape.lanes; ++lane) {
        lanes.append(lane_dict(work[static_cast<size_t>(lane)]));
    }
    nb::dict of_shape = shape_dict(shape);
    of_shape["workspace_bytes"] =
        workspace_layout(shape, gpu, max_seqlen_q, params.head_dim, params.head_dim_v).bytes;
    of_shape["largest_workspace"] = largest_workspace(params, gpu);
    if (shape.num_sms > 0) {
        const auto& tail = *reinterpret_cast<const PlanTail*>(work.data() + shape.lanes);
        of_shape["prefill_ctas"] = tail.prefill_ctas;
    }
    return nb::make_tuple(lanes, of_shape);
}

// (KV head, tile of query tokens) of each item that a sequence is for the prefill kernels, in their
// order.
nb::list prefill_places(
    int32_t tokens, int32_t num_kv_heads, int32_t keys_in_cache, int32_t q_len, int32_t kv_len
) {
    const PrefillShape shape = {tokens, num_kv_heads, keys_in_cache};
    const int32_t items = prefill_items(shape, q_len);
    nb::list places;
    for (int32_t item = 0; item < items; ++item) {
        const PrefillPlace place = prefill_place(shape, q_len, kv_len, static_cast<uint32_t>(item));
        places.append(nb::make_tuple(place.kv_head, place.tile));
    }
    return places;
}

// What CTAs claim, one number after another: (item, piece, pieces).
nb::list prefill_claims(uint32_t items, uint32_t ctas, uint32_t most_pieces) {
    check(ctas > 0, "prefill_claims: ctas must be > 0, got ", ctas);
    const PrefillCuts cuts = cut_items(items, ctas, most_pieces);
    nb::list claims;
    const uint32_t count = items + cuts.cut * (cuts.pieces - 1);
    for (uint32_t number = 0; number < count; ++number) {
        const PrefillClaim claim = claim_of(cuts, number);
        claims.append(
            nb::make_tuple(claim.item, claim.piece, claim.item < cuts.whole ? 1 : cuts.pieces)
        );
    }
    return claims;
}

// The tiles of keys [first, end) that a piece of an item has.
nb::tuple prefill_piece(int32_t first, int32_t end, uint32_t piece, uint32_t pieces) {
    const KeyTiles tiles = piece_of({first, end}, piece, pieces);
    return nb::make_tuple(tiles.first, tiles.end);
}

void choose_prefill_by_name(const std::string& name) {
    if (name == "best") {
        choose_prefill(PrefillChoice::kBest);
    } else if (name == "portable") {
        choose_prefill(PrefillChoice::kPortable);
    } else if (name == "none") {
        choose_prefill(PrefillChoice::kNone);
    } else {
        fail("choose_prefill: name must be best, portable or none, got ", name);
    }
}

std::string plan_text(const Plan& plan) {
    const PlanParams& made_for = plan.params;
    return message(
        "Plan(batch=",
        made_for.batch,
        ", max_seqlen_q=",
        made_for.max_seqlen_q,
        ", max_seqlen_k=",
        made_for.max_seqlen_k > 0 ? message(made_for.max_seqlen_k) : "None",
        ", num_q_heads=",
        made_for.num_q_heads,
        ", num_kv_heads=",
        made_for.num_kv_heads,
        ", head_dim=",
        made_for.head_dim,
        ", head_dim_v=",
        made_for.head_dim_v,
        ", page_size=",
        plan.page_size,
        ", causal=",
        truth(made_for.causal),
        ", window=(",
        made_for.window_left,
        ", ",
        made_for.window_right,
        "), num_splits=",
        made_for.num_splits,
        ", batch_invariant=",
        truth(made_for.batch_invariant),
        ", fp8_products=",
        truth(made_for.fp8_products),
        ") on ",
        device_text(made_for.device)
    );
}

}  // namespace

void Plan::require_fits(
    const char* function, const char* name, const PlanParams& call, int64_t call_page_size
) const {
    const auto same = [&](const char* what, const auto& made_for, const auto& got) {
        check(
            made_for == got,
            function,
            ": ",
            name,
            " was made for ",
            what,
            " ",
            made_for,
            ", got ",
            got
        );
    };
    const auto within = [&](const char* what, int64_t made_for, int64_t got) {
        const int64_t bound = made_for > 0 ? made_for : kMaxLength;
        check(
            got >= 0 && got <= bound,
            function,
            ": ",
            name,
            " was made for ",
            what,
            " from 0 to ",
            bound,
            ", got ",
            got
        );
    };
    if (params.device != call.device) [[unlikely]] {
        fail(
            function,
            ": ",
            name,
            " was made on ",
            device_text(params.device),
            ", got tensors on ",
            device_text(call.device)
        );
    }
    same("batch", params.batch, call.batch);
    same("num_q_heads", params.num_q_heads, call.num_q_heads);
    same("num_kv_heads", params.num_kv_heads, call.num_kv_heads);
    same("head_dim", params.head_dim, call.head_dim);
    same("head_dim_v", params.head_dim_v, call.head_dim_v);
    same("page_size", page_size, call_page_size);
    same("num_splits", params.num_splits, call.num_splits);
    if (params.batch_invariant != call.batch_invariant) [[unlikely]] {
        same("batch_invariant", truth(params.batch_invariant), truth(call.batch_invariant));
    }
    if (params.fp8_products != call.fp8_products) [[unlikely]] {
        same("fp8_products", truth(params.fp8_products), truth(call.fp8_products));
    }
    if (Visible(params) != Visible(call)) [[unlikely]] {
        fail(function, ": ", name, " was made for ", mask_text(params), ", got ", mask_text(call));
    }
    const bool call_has_cu_seqlens_q = call.cu_seqlens_q != nullptr;
    check(
        has_cu_seqlens_q == call_has_cu_seqlens_q,
        function,
        ": ",
        name,
        has_cu_seqlens_q ? " was made with cu_seqlens_q, got None"
                         : " was made for one query a sequence (cu_seqlens_q None), got a tensor"
    );
    within("max_seqlen_q", params.max_seqlen_q, call.max_seqlen_q);
    within("max_seqlen_k", params.max_seqlen_k, call.max_seqlen_k);
}

const Plan* parse_plan(const char* function, const char* name, nb::handle object) {
    if (object.is_none()) {
        return nullptr;
    }
    if (!nb::isinstance<Plan>(object)) [[unlikely]] {
        throw nb::type_error(message(
                                 function,
                                 ": ",
                                 name,
                                 " must be a pagetile.Plan or None, got ",
                                 nb::type_name(object.type()).c_str()
        )
                                 .c_str());
    }
    return nb::inst_ptr<Plan>(object);
}

}  // namespace pagetile

void export_plan(nb::module_& m) {
    using pagetile::Plan;
    nb::class_<Plan>(
        m,
        "Plan",
        "The schedule of a step's attention, on the device of its tensors: which worker computes\n"
        "which keys of which queries.\n\n"
        "`make_plan` makes one, every `paged_attention` of the step may use it. What it was made\n"
        "for can be read and not changed; a call that does not fit raises before anything runs."
    )
        .def_prop_ro(
            "buffer",
            [](const Plan& plan) { return plan.buffer; },
            nb::sig("def buffer(self) -> typing.Any"),
            "The schedule itself: int32 [n], in the framework of the seqused_k it was made from. "
            "(JAX has no writable arrays: there, a buffer that exports DLPack.)"
        )
        .def_prop_ro(
            "batch",
            [](const Plan& plan) { return plan.params.batch; },
            "B, sequences of a step, empty ones included."
        )
        .def_prop_ro(
            "max_seqlen_q",
            [](const Plan& plan) { return plan.params.max_seqlen_q; },
            "The bound of a sequence's queries; 0 is unknown."
        )
        .def_prop_ro(
            "max_seqlen_k",
            [](const Plan& plan) -> std::optional<int64_t> {
                if (plan.params.max_seqlen_k == 0) {
                    return std::nullopt;
                }
                return plan.params.max_seqlen_k;
            },
            "The bound of a sequence's length; None is unknown."
        )
        .def_prop_ro(
            "num_q_heads", [](const Plan& plan) { return plan.params.num_q_heads; }, "Hq."
        )
        .def_prop_ro(
            "num_kv_heads", [](const Plan& plan) { return plan.params.num_kv_heads; }, "Hkv."
        )
        .def_prop_ro(
            "head_dim", [](const Plan& plan) { return plan.params.head_dim; }, "D, of q and k."
        )
        .def_prop_ro(
            "head_dim_v", [](const Plan& plan) { return plan.params.head_dim_v; }, "Dv, of v."
        )
        .def_prop_ro(
            "page_size", [](const Plan& plan) { return plan.page_size; }, "S, tokens of a page."
        )
        .def_prop_ro(
            "causal",
            [](const Plan& plan) { return plan.params.causal; },
            "Whether queries see no later keys."
        )
        .def_prop_ro(
            "window",
            [](const Plan& plan) {
                return std::pair(plan.params.window_left, plan.params.window_right);
            },
            "(left, right) tokens that a query sees around its own; -1 is unlimited."
        )
        .def_prop_ro(
            "num_splits",
            [](const Plan& plan) { return plan.params.num_splits; },
            "The most cuts of a sequence; 0 chooses."
        )
        .def_prop_ro(
            "batch_invariant",
            [](const Plan& plan) { return plan.params.batch_invariant; },
            "Whether a sequence's bits depend on nothing but the sequence."
        )
        .def_prop_ro(
            "fp8_products",
            [](const Plan& plan) { return plan.params.fp8_products; },
            "Whether e4m3 may be multiplied with e4m3."
        )
        .def("__repr__", &pagetile::plan_text);
    pagetile::define(
        m,
        "make_plan",
        &pagetile::make_plan_binding,
        nb::sig(
            "def make_plan(seqused_k: object, cu_seqlens_q: object, max_seqlen_q: int, "
            "max_seqlen_k: int, num_q_heads: int, num_kv_heads: int, head_dim: int, "
            "head_dim_v: int, page_size: int, causal: bool, window_left: int, window_right: int, "
            "num_splits: int, batch_invariant: bool, fp8_products: bool, out: object, allocate: "
            "object, "
            "stream: object, /) -> Plan"
        )
    );
    pagetile::define(
        m,
        "workspace_size",
        &pagetile::workspace_size_binding,
        nb::sig(
            "def workspace_size(max_seqlen_q: int, max_seqlen_k: int, num_q_heads: int, "
            "num_kv_heads: int, head_dim: int, head_dim_v: int, batch_invariant: bool, "
            "on_cuda: bool, device_index: int, /) -> int"
        )
    );
    m.def(
        "attention_plan",
        &pagetile::attention_plan,
        nb::arg("cu_seqlens_q").none(),
        nb::arg("seqused_k"),
        nb::kw_only(),
        nb::arg("num_q_heads"),
        nb::arg("num_kv_heads"),
        nb::arg("head_dim") = 128,
        nb::arg("head_dim_v") = nb::none(),
        nb::arg("max_seqlen_q") = 0,
        nb::arg("max_seqlen_k") = 0,
        nb::arg("causal") = true,
        nb::arg("window_left") = -1,
        nb::arg("window_right") = -1,
        nb::arg("num_splits") = 0,
        nb::arg("batch_invariant") = false,
        nb::arg("num_sms") = 132,
        nb::arg("has_clusters") = true,
        nb::arg("has_wgmma") = true,
        nb::arg("has_prefill") = true,
        nb::sig(
            "def attention_plan(cu_seqlens_q: object, seqused_k: object, *, num_q_heads: int, "
            "num_kv_heads: int, head_dim: int = 128, head_dim_v: int | None = None, "
            "max_seqlen_q: int = 0, max_seqlen_k: int = 0, causal: bool = True, "
            "window_left: int = -1, window_right: int = -1, num_splits: int = 0, "
            "batch_invariant: bool = False, num_sms: int = 132, has_clusters: bool = True, "
            "has_wgmma: bool = True, has_prefill: bool = True) "
            "-> tuple[list[dict[str, typing.Any]], dict[str, int]]"
        )
    );
    m.def(
        "prefill_places",
        &pagetile::prefill_places,
        nb::arg("tokens"),
        nb::arg("num_kv_heads"),
        nb::arg("keys_in_cache"),
        nb::arg("q_len"),
        nb::arg("kv_len"),
        nb::sig(
            "def prefill_places(tokens: int, num_kv_heads: int, keys_in_cache: int, q_len: int, "
            "kv_len: int) -> list[tuple[int, int]]"
        )
    );
    m.def(
        "prefill_claims",
        &pagetile::prefill_claims,
        nb::arg("items"),
        nb::arg("ctas"),
        nb::arg("most_pieces"),
        nb::sig(
            "def prefill_claims(items: int, ctas: int, most_pieces: int) "
            "-> list[tuple[int, int, int]]"
        )
    );
    m.def(
        "prefill_piece",
        &pagetile::prefill_piece,
        nb::arg("first"),
        nb::arg("end"),
        nb::arg("piece"),
        nb::arg("pieces"),
        nb::sig(
            "def prefill_piece(first: int, end: int, piece: int, pieces: int) -> tuple[int, int]"
        )
    );
    m.def(
        "choose_prefill",
        &pagetile::choose_prefill_by_name,
        nb::arg("name"),
        nb::sig("def choose_prefill(name: str) -> None")
    );
}

// Calls checked by shapes and dtypes alone, with the messages of the real ones: what a traced call
// can be told before anything runs.

#include "attention/dispatch.h"
#include "operands.h"
#include "pagetile/attention.h"
#include "pagetile/cache_write.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace pagetile {
namespace {

// By the name that NumPy and ml_dtypes give it: letters for the kind, then the bits.
nb::dlpack::dtype dtype_of(const char* function, const char* operand, const std::string& name) {
    using Code = nb::dlpack::dtype_code;

    constexpr struct {
        const char* name;
        Code code;
    } kCodes[] = {
        {"int", Code::Int},
        {"uint", Code::UInt},
        {"float", Code::Float},
        {"bfloat", Code::Bfloat},
        {"complex", Code::Complex},
        {"bool", Code::Bool},
        {"float8_e4m3fn", Code::Float8_E4M3FN},
        {"float8_e5m2", Code::Float8_E5M2},
    };

    const size_t digits = std::min(name.find_first_of("0123456789"), name.size());
    const bool is_plain = name.find('_') == std::string::npos;
    for (const auto& entry : kCodes) {
        if ((is_plain ? name.substr(0, digits) : name) == entry.name) {
            const int bits = is_plain && digits < name.size() ? std::stoi(name.substr(digits)) : 8;
            return {static_cast<uint8_t>(entry.code), static_cast<uint8_t>(bits), 1};
        }
    }
    fail(
        function,
        ": ",
        operand,
        " must be float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8, int32 or int64, "
        "got ",
        name
    );
}

// An operand: None, or (name of its dtype, shape).
class AbstractOperands {
public:
    explicit AbstractOperands(const nb::list& operands) : operands_(operands) {}

    Tensor operator()(const char* function, const char* name) {
        const nb::handle operand = operands_[next_++];
        if (operand.is_none()) {
            return Tensor(function, name);
        }
        const auto [dtype, sizes] = nb::cast<std::pair<std::string, std::vector<int64_t>>>(operand);
        static char memory = 0;  // nobody looks at it
        return Tensor(function, name, dtype_of(function, name, dtype), sizes, &memory, Device{});
    }

private:
    const nb::list& operands_;
    size_t next_ = 0;
};

// The library checks a call before it looks whether there is work. So these calls have none.

void check_cache_write(
    const nb::list& operands, const std::string& kv_dtype, const std::string& layout
) {
    CacheWriteParams params =
        parse_cache_write(cache_write_operands(AbstractOperands(operands)), kv_dtype, layout);
    params.num_tokens = 0;
    cache_write(params, /*stream=*/0);
}

void check_paged_attention(
    const nb::list& operands,
    int64_t max_seqlen_q,
    int64_t max_seqlen_k,
    double softmax_scale,
    int64_t window_left,
    int64_t window_right,
    double softcap,
    const std::string& kv_dtype,
    const std::string& layout,
    int64_t num_splits,
    bool fp8_products
) {
    AttentionParams params = parse_attention(
        attention_operands(AbstractOperands(operands)),
        {
            .max_seqlen_q = max_seqlen_q,
            .max_seqlen_k = max_seqlen_k,
            .softmax_scale = softmax_scale,
            .window_left = window_left,
            .window_right = window_right,
            .softcap = softcap,
            .kv_dtype = kv_dtype,
            .layout = layout,
            .num_splits = num_splits,
            .fp8_products = fp8_products,
        }
    );
    params.batch = 0;
    params.validate = false;
    paged_attention(params, /*stream=*/0);
}

void check_merge_states(const nb::list& operands) {
    constexpr const char* kFunction = "merge_states";
    AbstractOperands next(operands);
    const MergeTensors tensors = {
        .out_a = next(kFunction, "out_a"),
        .lse_a = next(kFunction, "lse_a"),
        .out_b = next(kFunction, "out_b"),
        .lse_b = next(kFunction, "lse_b"),
        .out = next(kFunction, "out"),
        .lse = next(kFunction, "lse"),
    };
    MergeStatesParams params = parse_merge(tensors, /*tokens_with_a=*/-1);
    params.num_tokens = 0;
    merge_states(params, /*stream=*/0);
}

// Types and head dimensions alone, on a CPU or a GPU, which need not be there: what a build takes, its
// calls say themselves.

DType dtype_named(const char* function, const std::string& name) {
    for (const DType dtype :
         {DType::kFloat32,
          DType::kFloat16,
          DType::kBFloat16,
          DType::kFloat8E4M3,
          DType::kFloat8E5M2}) {
        if (name == dtype_name(dtype)) {
            return dtype;
        }
    }
    fail(function, ": no such type: ", name);
}

Device device_of(bool on_gpu) {
    return {.kind = on_gpu ? DeviceKind::kCuda : DeviceKind::kCpu, .index = 0};
}

void check_write_types(
    const std::string& rows, const std::string& cache, int64_t head_dim, bool on_gpu
) {
    constexpr const char* kFunction = "cache_write";
    CacheWriteParams params = {
        .num_kv_heads = 1,
        .page_size = 1,
        .dtype = dtype_named(kFunction, rows),
        .cache_dtype = dtype_named(kFunction, cache),
        .device = device_of(on_gpu),
    };
    params.k.head_dim = params.v.head_dim = head_dim;
    params.k_cache.chunk = params.v_cache.chunk = head_dim;
    cache_write(params, /*stream=*/0);
}

void check_attention_types(
    const std::string& q,
    const std::string& cache,
    int64_t head_dim,
    int64_t head_dim_v,
    bool on_gpu
) {
    constexpr const char* kFunction = "paged_attention";
    static constexpr int32_t kNoEntries[1] = {};  // nobody looks at it
    const DType q_dtype = dtype_named(kFunction, q);
    paged_attention(
        {.num_q_heads = 1,
         .num_kv_heads = 1,
         .head_dim = head_dim,
         .head_dim_v = head_dim_v,
         .page_size = 1,
         .q_dtype = q_dtype,
         .kv_dtype = dtype_named(kFunction, cache),
         .out_dtype = is_float8(q_dtype) ? DType::kBFloat16 : q_dtype,
         .block_table = kNoEntries,
         .seqused_k = kNoEntries,
         .device = device_of(on_gpu)},
        /*stream=*/0
    );
}

// Whether the WGMMA kernel would multiply e4m3 with e4m3, if it took the tensors.
bool multiplies_e4m3_of(
    const std::string& q,
    const std::string& cache,
    const std::string& out,
    int64_t head_dim,
    int64_t head_dim_v,
    float softmax_scale,
    float softcap,
    bool has_alibi,
    bool fp8_products
) {
    constexpr const char* kFunction = "multiplies_e4m3";
    static constexpr float kNoSlopes[1] = {};  // nobody looks at it
    return multiplies_e4m3({
        .head_dim = head_dim,
        .head_dim_v = head_dim_v,
        .q_dtype = dtype_named(kFunction, q),
        .kv_dtype = dtype_named(kFunction, cache),
        .out_dtype = dtype_named(kFunction, out),
        .softmax_scale = softmax_scale,
        .softcap = softcap,
        .alibi_slopes = has_alibi ? kNoSlopes : nullptr,
        .fp8_products = fp8_products,
    });
}

}  // namespace
}  // namespace pagetile

void export_check_calls(nb::module_& m) {
    m.def(
        "check_cache_write",
        &pagetile::check_cache_write,
        nb::sig(
            "def check_cache_write(operands: list[tuple[str, tuple[int, ...]] | None], "
            "kv_dtype: str, layout: str, /) -> None"
        )
    );
    m.def(
        "check_paged_attention",
        &pagetile::check_paged_attention,
        nb::sig(
            "def check_paged_attention(operands: list[tuple[str, tuple[int, ...]] | None], "
            "max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, window_left: int, "
            "window_right: int, softcap: float, kv_dtype: str, layout: str, num_splits: int, "
            "fp8_products: bool, /) -> None"
        )
    );
    m.def(
        "check_merge_states",
        &pagetile::check_merge_states,
        nb::sig(
            "def check_merge_states(operands: list[tuple[str, tuple[int, ...]] | None], /) -> None"
        )
    );
    m.def(
        "check_write_types",
        &pagetile::check_write_types,
        nb::sig(
            "def check_write_types(rows: str, cache: str, head_dim: int, on_gpu: bool, /) -> None"
        )
    );
    m.def(
        "check_attention_types",
        &pagetile::check_attention_types,
        nb::sig(
            "def check_attention_types(q: str, cache: str, head_dim: int, head_dim_v: int, on_gpu: "
            "bool, /) -> None"
        )
    );
    m.def(
        "multiplies_e4m3",
        &pagetile::multiplies_e4m3_of,
        nb::arg("q") = "float8_e4m3fn",
        nb::arg("cache") = "float8_e4m3fn",
        nb::arg("out") = "bfloat16",
        nb::arg("head_dim") = 128,
        nb::arg("head_dim_v") = 128,
        nb::arg("softmax_scale") = 1.0f,
        nb::arg("softcap") = 0.0f,
        nb::arg("has_alibi") = false,
        nb::arg("fp8_products") = true,
        nb::sig(
            "def multiplies_e4m3(q: str = 'float8_e4m3fn', cache: str = 'float8_e4m3fn', out: str "
            "= "
            "'bfloat16', head_dim: int = 128, head_dim_v: int = 128, softmax_scale: float = 1.0, "
            "softcap: float = 0.0, has_alibi: bool = False, fp8_products: bool = True) -> bool"
        )
    );
}

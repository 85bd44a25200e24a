// Handlers for XLA's FFI: what pagetile.jax calls from traced code, on the CPU and on CUDA.
//
// A call's operands come in the order of operands.h. Attribute `given` has a bit for each of them: 1
// if the call has it. What cache_write and paged_attention write is an operand too, and the result
// in its memory: XLA aliases them. No Python runs here; another thread may hold the GIL.

#include "operands.h"
#include "xla/ffi/api/ffi.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace pagetile {
namespace {

struct CacheWriteAttributes {
    int64_t given;
    std::string_view kv_dtype;
    std::string_view layout;
};

struct AttentionAttributes {
    int64_t given;
    int64_t max_seqlen_q;
    int64_t max_seqlen_k;
    double softmax_scale;
    bool causal;
    int64_t window_left;
    int64_t window_right;
    double softcap;
    std::string_view kv_dtype;
    std::string_view layout;
    int64_t num_splits;
    bool batch_invariant;
    bool fp8_products;
};

using MergeAttributes = ffi::Dictionary;  // has none

}  // namespace
}  // namespace pagetile

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    pagetile::CacheWriteAttributes,
    StructMember<int64_t>("given"),
    StructMember<std::string_view>("kv_dtype"),
    StructMember<std::string_view>("layout")
);
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    pagetile::AttentionAttributes,
    StructMember<int64_t>("given"),
    StructMember<int64_t>("max_seqlen_q"),
    StructMember<int64_t>("max_seqlen_k"),
    StructMember<double>("softmax_scale"),
    StructMember<bool>("causal"),
    StructMember<int64_t>("window_left"),
    StructMember<int64_t>("window_right"),
    StructMember<double>("softcap"),
    StructMember<std::string_view>("kv_dtype"),
    StructMember<std::string_view>("layout"),
    StructMember<int64_t>("num_splits"),
    StructMember<bool>("batch_invariant"),
    StructMember<bool>("fp8_products")
);

namespace pagetile {
namespace {

nb::dlpack::dtype dtype_of(const char* function, const char* name, ffi::DataType type) {
    using Code = nb::dlpack::dtype_code;
    const auto of = [](Code code, uint8_t bits) {
        return nb::dlpack::dtype{static_cast<uint8_t>(code), bits, 1};
    };
    switch (type) {
        case ffi::F32:
            return of(Code::Float, 32);
        case ffi::F16:
            return of(Code::Float, 16);
        case ffi::BF16:
            return of(Code::Bfloat, 16);
        case ffi::F8E4M3FN:
            return of(Code::Float8_E4M3FN, 8);
        case ffi::F8E5M2:
            return of(Code::Float8_E5M2, 8);
        case ffi::U8:
            return of(Code::UInt, 8);
        case ffi::S32:
            return of(Code::Int, 32);
        case ffi::S64:
            return of(Code::Int, 64);
        default:
            fail(function, ": ", name, " has XLA's data type ", static_cast<int>(type));
    }
}

Tensor tensor_of(
    const char* function, const char* name, const ffi::AnyBuffer& buffer, Device device
) {
    const auto sizes = buffer.dimensions();
    return Tensor(
        function,
        name,
        dtype_of(function, name, buffer.element_type()),
        std::span(sizes.begin(), sizes.size()),
        buffer.untyped_data(),
        device
    );
}

template <class T>
T value_of(const ffi::ErrorOr<T>& decoded) {
    if (decoded.has_error()) {
        throw std::runtime_error(decoded.error().message());
    }
    return *decoded;
}

class Operands {
public:
    Operands(const ffi::RemainingArgs& buffers, int64_t given, Device device)
        : buffers_(buffers), given_(given), device_(device) {}

    Tensor operator()(const char* function, const char* name) {
        const bool is_given = (given_ & 1) != 0;
        given_ >>= 1;
        if (!is_given) {
            return Tensor(function, name);
        }
        const auto buffer = value_of(buffers_.get<ffi::AnyBuffer>(next_++));
        return tensor_of(function, name, buffer, device_);
    }

private:
    const ffi::RemainingArgs& buffers_;
    int64_t given_;
    Device device_;
    size_t next_ = 0;
};

// The results must lie where the operands do that they alias.
void require_aliased(
    const char* function,
    const ffi::RemainingRets& results,
    std::initializer_list<const Tensor*> written
) {
    size_t index = 0;
    for (const Tensor* tensor : written) {
        if (tensor->given()) {
            auto result = value_of(results.get<ffi::AnyBuffer>(index++));
            if (tensor->numel() > 0 && result->untyped_data() != tensor->data()) {
                throw std::logic_error(
                    message(function, ": XLA gave ", tensor->name(), " and its result two places")
                );
            }
        }
    }
}

struct Call {
    Device device;
    Stream stream = 0;
    ffi::RemainingArgs operands;
    ffi::RemainingRets results;
};

void run(const Call& call, const CacheWriteAttributes& attributes) {
    const CacheWriteTensors tensors =
        cache_write_operands(Operands(call.operands, attributes.given, call.device));
    require_aliased("cache_write", call.results, {&tensors.k_cache, &tensors.v_cache});
    cache_write(
        parse_cache_write(
            tensors, std::string(attributes.kv_dtype), std::string(attributes.layout)
        ),
        call.stream
    );
}

void run(const Call& call, const AttentionAttributes& attributes) {
    const AttentionTensors tensors =
        attention_operands(Operands(call.operands, attributes.given, call.device));
    require_aliased("paged_attention", call.results, {&tensors.out, &tensors.softmax_lse});
    const AttentionOptions options = {
        .max_seqlen_q = attributes.max_seqlen_q,
        .max_seqlen_k = attributes.max_seqlen_k,
        .softmax_scale = attributes.softmax_scale,
        .causal = attributes.causal,
        .window_left = attributes.window_left,
        .window_right = attributes.window_right,
        .softcap = attributes.softcap,
        .kv_dtype = std::string(attributes.kv_dtype),
        .layout = std::string(attributes.layout),
        .num_splits = attributes.num_splits,
        .batch_invariant = attributes.batch_invariant,
        .fp8_products = attributes.fp8_products,
    };
    paged_attention(parse_attention(tensors, options), call.stream);
}

void run(const Call& call, const MergeAttributes&) {
    constexpr const char* kFunction = "merge_states";
    Operands operand(call.operands, /*given=*/0b1111, call.device);
    const auto result = [&](size_t index, const char* name) {
        auto buffer = value_of(call.results.get<ffi::AnyBuffer>(index));
        return tensor_of(kFunction, name, *buffer, call.device);
    };
    const MergeTensors tensors = {
        .out_a = operand(kFunction, "out_a"),
        .lse_a = operand(kFunction, "lse_a"),
        .out_b = operand(kFunction, "out_b"),
        .lse_b = operand(kFunction, "lse_b"),
        .out = result(0, "out"),
        .lse = result(1, "lse"),
    };
    merge_states(parse_merge(tensors, /*tokens_with_a=*/-1), call.stream);
}

template <class Attributes>
ffi::Error run_guarded(const Call& call, const Attributes& attributes) {
    try {
        run(call, attributes);
        return ffi::Error::Success();
    } catch (const std::invalid_argument& error) {
        return ffi::Error::InvalidArgument(error.what());
    } catch (const NotBuiltError& error) {
        return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
    } catch (const std::exception& error) {
        return ffi::Error::Internal(error.what());
    }
}

template <class Attributes>
XLA_FFI_Error* on_cpu(XLA_FFI_CallFrame* frame) {
    static const auto* handler =
        ffi::Ffi::Bind()
            .RemainingArgs()
            .RemainingRets()
            .Attrs<Attributes>()
            .To([](ffi::RemainingArgs operands, ffi::RemainingRets results, Attributes attributes) {
                return run_guarded({{}, 0, operands, results}, attributes);
            })
            .release();
    return handler->Call(frame);
}

// Not marked as fit for command buffers (XLA's CUDA graphs): XLA may run parts of one at the same
// time, and calls captured from one stream share the workspace that the library keeps for it.
template <class Attributes>
XLA_FFI_Error* on_cuda(XLA_FFI_CallFrame* frame) {
    static const auto* handler = ffi::Ffi::Bind()
                                     .Ctx<ffi::PlatformStream<void*>>()
                                     .Ctx<ffi::DeviceOrdinal>()
                                     .RemainingArgs()
                                     .RemainingRets()
                                     .Attrs<Attributes>()
                                     .To([](void* stream,
                                            int32_t ordinal,
                                            ffi::RemainingArgs operands,
                                            ffi::RemainingRets results,
                                            Attributes attributes) {
                                         return run_guarded(
                                             {{.kind = DeviceKind::kCuda, .index = ordinal},
                                              reinterpret_cast<Stream>(stream),
                                              operands,
                                              results},
                                             attributes
                                         );
                                     })
                                     .release();
    return handler->Call(frame);
}

// Without the CUDA part, the handlers for CUDA say that it was not built.
nb::dict handlers() {
    const auto capsules =
        [](XLA_FFI_Handler* write, XLA_FFI_Handler* attend, XLA_FFI_Handler* merge) {
            const auto capsule = [](XLA_FFI_Handler* handler) {
                return nb::capsule(reinterpret_cast<void*>(handler));
            };
            nb::dict functions;
            functions["cache_write"] = capsule(write);
            functions["paged_attention"] = capsule(attend);
            functions["merge_states"] = capsule(merge);
            return functions;
        };
    nb::dict platforms;
    platforms["cpu"] = capsules(
        on_cpu<CacheWriteAttributes>, on_cpu<AttentionAttributes>, on_cpu<MergeAttributes>
    );
    platforms["CUDA"] = capsules(
        on_cuda<CacheWriteAttributes>, on_cuda<AttentionAttributes>, on_cuda<MergeAttributes>
    );
    return platforms;
}

}  // namespace
}  // namespace pagetile

void export_xla_ffi(nb::module_& m) {
    m.def(
        "xla_ffi_handlers",
        &pagetile::handlers,
        nb::sig("def xla_ffi_handlers() -> dict[str, dict[str, typing.Any]]")
    );
}

#include "pagetile/block_pool.h"

#include "pagetile/error.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace {

using pagetile::BlockPool;
using pagetile::message;
using pagetile::Step;

// Replaces Python's own TypeError, which does not know the argument's name. Other errors pass.
[[noreturn]] void raise_type_error(const std::string& text) {
    nb::python_error error;
    if (!error.matches(PyExc_TypeError)) {
        throw error;
    }
    throw nb::type_error(text.c_str());
}

// An int, or what has __index__ (a NumPy integer).
int64_t read_int(nb::handle value, const std::string& name) {
    const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
    if (!number.is_valid()) {
        raise_type_error(
            message(name, " must be an int, got ", nb::type_name(value.type()).c_str())
        );
    }
    int overflow = 0;
    const int64_t result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    pagetile::check(overflow == 0, name, " must fit in an int64, got ", nb::str(number).c_str());
    return result;
}

// A list or any other iterable of ints; a 1-D int64 array is the quickest.
std::vector<int64_t> read_ints(nb::handle value, const char* name, const char* expected) {
    std::vector<int64_t> result;
    const auto push = [&](nb::handle item) {
        int overflow = 1;  // plain ints take the short way: there may be 10,000 of them in a step
        const int64_t number =
            PyLong_CheckExact(item.ptr()) ? PyLong_AsLongLongAndOverflow(item.ptr(), &overflow) : 0;
        result.push_back(
            overflow == 0 ? number : read_int(item, message(name, "[", result.size(), "]"))
        );
    };
    if (PyList_Check(value.ptr())) {
        result.reserve(PyList_Size(value.ptr()));
        for (Py_ssize_t i = 0; i < PyList_Size(value.ptr()); ++i) {
            push(nb::borrow(PyList_GetItem(value.ptr(), i)));
        }
        return result;
    }
    nb::ndarray<const int64_t, nb::ndim<1>> array;
    if (nb::try_cast(value, array, /*convert=*/false)) {
        if (array.device_type() != nb::device::cpu::value) {
            throw nb::type_error(
                message(name, " must be on the CPU, got a tensor on another device").c_str()
            );
        }
        result.resize(array.shape(0));
        for (size_t i = 0; i < result.size(); ++i) {
            result[i] = array(i);
        }
        return result;
    }
    const nb::object iterator = nb::steal(PyObject_GetIter(value.ptr()));
    if (!iterator.is_valid()) {
        raise_type_error(
            message(name, " must be ", expected, ", got ", nb::type_name(value.type()).c_str())
        );
    }
    for (nb::object item; (item = nb::steal(PyIter_Next(iterator.ptr()))).is_valid();) {
        push(item);
    }
    if (PyErr_Occurred() != nullptr) {
        throw nb::python_error();
    }
    return result;
}

// One int for all sequences, or one for each.
std::vector<int64_t> read_counts(nb::handle value, size_t batch) {
    constexpr const char* kName = "BlockPool.append: num_tokens";
    const bool many = nb::hasattr(value, "__len__");
    if (!many && PyIndex_Check(value.ptr())) {
        return {read_int(value, kName)};
    }
    std::vector<int64_t> counts =
        read_ints(value, kName, "an int, a list of ints or an int64 array [B]");
    if (counts.size() != batch) {
        const char* expected = " must be one int, or one for each of ";
        pagetile::check(false, kName, expected, batch, " sequences, got ", counts.size());
    }
    return counts;
}

// A writable NumPy array over memory that the owner keeps alive.
template <class T>
nb::object numpy_view(
    T* data,
    std::initializer_list<size_t> shape,
    nb::handle owner,
    std::initializer_list<int64_t> strides = {}
) {
    static T none = 0;  // an empty vector has no data, NumPy wants an address
    return nb::cast(
        nb::ndarray<nb::numpy, T>(data == nullptr ? &none : data, shape, owner, strides)
    );
}

template <class T>
nb::object numpy_view(std::vector<T>& values, nb::handle owner) {
    return numpy_view(values.data(), {values.size()}, owner);
}

// In the order of the fields of pagetile.Step. The arrays share one owner, the Step.
nb::tuple append(BlockPool& pool, nb::handle sequences, nb::handle num_tokens) {
    const std::vector<int64_t> ids =
        read_ints(sequences, "BlockPool.append: sequences", "a list of ints or an int64 array [B]");
    const std::vector<int64_t> counts = read_counts(num_tokens, ids.size());
    auto owned = std::make_unique<Step>();
    Step& step = *owned;
    pool.append(ids, counts, step);
    const nb::capsule owner(owned.release(), [](void* memory) noexcept {
        delete static_cast<Step*>(memory);
    });
    return nb::make_tuple(
        numpy_view(step.slot_mapping, owner),
        numpy_view(
            step.block_table.get(),
            {ids.size(), static_cast<size_t>(step.max_pages)},
            owner,
            {step.block_table_stride, 1}
        ),
        numpy_view(step.seqused_k, owner),
        numpy_view(step.cu_seqlens_q, owner),
        numpy_view(step.copy_src, owner),
        numpy_view(step.copy_dst, owner),
        step.total_q,
        step.max_seqlen_q,
        step.max_seqlen_k
    );
}

nb::object pages(const BlockPool& pool, nb::handle sequence) {
    const auto pages = pool.pages(read_int(sequence, "BlockPool.pages: sequence"));
    auto owned = std::make_unique<std::vector<int32_t>>(pages.begin(), pages.end());
    std::vector<int32_t>& copy = *owned;
    const nb::capsule owner(owned.release(), [](void* memory) noexcept {
        delete static_cast<std::vector<int32_t>*>(memory);
    });
    return numpy_view(copy, owner);
}

}  // namespace

void export_block_pool(nb::module_& m) {
    const nb::exception<pagetile::OutOfPagesError> out_of_pages(
        m, "OutOfPagesError", PyExc_RuntimeError
    );

    // none(): None reaches read_int, whose message names the argument.
    nb::class_<BlockPool>(m, "BlockPool")
        .def(
            "__init__",
            [](BlockPool* self, nb::handle num_pages, nb::handle page_size) {
                new (self) BlockPool(
                    read_int(num_pages, "BlockPool: num_pages"),
                    read_int(page_size, "BlockPool: page_size")
                );
            },
            nb::arg("num_pages").none(),
            nb::arg("page_size").none(),
            nb::sig("def __init__(self, num_pages: object, page_size: object) -> None")
        )
        .def("allocate", &BlockPool::allocate, nb::sig("def allocate(self) -> int"))
        .def(
            "fork",
            [](BlockPool& self, nb::handle sequence) {
                return self.fork(read_int(sequence, "BlockPool.fork: sequence"));
            },
            nb::arg("sequence").none(),
            nb::sig("def fork(self, sequence: object) -> int")
        )
        .def(
            "free",
            [](BlockPool& self, nb::handle sequence) {
                self.free(read_int(sequence, "BlockPool.free: sequence"));
            },
            nb::arg("sequence").none(),
            nb::sig("def free(self, sequence: object) -> None")
        )
        .def(
            "append",
            &append,
            nb::arg("sequences").none(),
            nb::arg("num_tokens").none(),
            nb::sig(
                "def append(self, sequences: object, num_tokens: object) -> tuple[typing.Any, ...]"
            )
        )
        .def(
            "length",
            [](const BlockPool& self, nb::handle sequence) {
                return self.length(read_int(sequence, "BlockPool.length: sequence"));
            },
            nb::arg("sequence").none(),
            nb::sig("def length(self, sequence: object) -> int")
        )
        .def(
            "pages",
            &pages,
            nb::arg("sequence").none(),
            nb::sig("def pages(self, sequence: object) -> typing.Any")
        )
        .def_prop_ro("num_pages", &BlockPool::num_pages, nb::sig("def num_pages(self) -> int"))
        .def_prop_ro("page_size", &BlockPool::page_size, nb::sig("def page_size(self) -> int"))
        .def_prop_ro(
            "num_free_pages", &BlockPool::num_free_pages, nb::sig("def num_free_pages(self) -> int")
        )
        .def("__len__", &BlockPool::num_sequences, nb::sig("def __len__(self) -> int"));
}

// In place of xla_ffi.cpp where XLA's FFI headers were not found.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void export_xla_ffi(nb::module_& m) {
    m.def(
        "xla_ffi_handlers",
        [] { return nb::dict(); },
        nb::sig("def xla_ffi_handlers() -> dict[str, dict[str, typing.Any]]")
    );
}

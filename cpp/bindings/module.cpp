#include <nanobind/nanobind.h>

namespace nb = nanobind;

void export_attention(nb::module_& m);
void export_block_pool(nb::module_& m);
void export_cache_write(nb::module_& m);
void export_check_calls(nb::module_& m);
void export_config(nb::module_& m);
void export_copy_pages(nb::module_& m);
void export_legacy(nb::module_& m);
void export_plan(nb::module_& m);
void export_xla_ffi(nb::module_& m);

NB_MODULE(_C, m) {
    m.doc() = "pagetile's C++ library. Private: the documented API is the package pagetile.";
    export_attention(m);
    export_block_pool(m);
    export_cache_write(m);
    export_check_calls(m);
    export_config(m);
    export_copy_pages(m);
    export_legacy(m);
    export_plan(m);
    export_xla_ffi(m);
}

#pragma once

#include <nanobind/nanobind.h>

namespace pagetile {

// Defines a function of positional arguments, any of which may be None: nanobind refuses None by
// default, and the shell in python/pagetile passes every argument by position because that is the
// fast way in.
template <class Return, class... Args, class Signature>
void define(
    nanobind::module_& m, const char* name, Return (*function)(Args...), const Signature& signature
) {
    const auto positional = []<class Arg>() { return nanobind::arg().none(); };
    m.def(name, function, positional.template operator()<Args>()..., signature);
}

}  // namespace pagetile

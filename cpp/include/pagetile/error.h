#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace pagetile {

// A combination of device, type and shape that this build has no kernel for. The message lists what
// it has.
struct NotBuiltError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string message(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    throw std::invalid_argument(message(parts...));
}

// Throws std::invalid_argument (Python: ValueError) unless the condition holds.
// The parts are put together on failure alone: "paged_attention: num_splits must be >= 0, got -1".
// Where computing one of them costs time, `if (...) { fail(...); }` keeps it off the path of a good
// call.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]] {
        fail(parts...);
    }
}

}  // namespace pagetile

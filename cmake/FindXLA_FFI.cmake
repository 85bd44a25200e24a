# XLA::FFI, the headers of XLA's foreign function interface: from XLA_FFI_ROOT (what jax.ffi.include_dir() returns;
# variable or environment), or from the PyPI package jaxlib where the Python packages' directory is on CMAKE_PREFIX_PATH.
find_path(
  XLA_FFI_INCLUDE_DIR
  xla/ffi/api/ffi.h
  HINTS ${XLA_FFI_ROOT}
  ENV XLA_FFI_ROOT
  PATH_SUFFIXES
    include
    jaxlib/include
    NO_CACHE # a build folder in use again would keep the headers of a build environment that is gone
)

# XLA loads handlers of its own version and of older ones, back to 0.1 (tried: jaxlib 0.10.2, whose version is 0.3).
if(XLA_FFI_INCLUDE_DIR)
  file(
    STRINGS ${XLA_FFI_INCLUDE_DIR}/xla/ffi/api/c_api.h
    version_lines
    REGEX "#define XLA_FFI_API_(MAJOR|MINOR) +[0-9]+"
  )
  string(REGEX MATCHALL "[0-9]+" version_numbers "${version_lines}")
  list(JOIN version_numbers "." XLA_FFI_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  XLA_FFI
  REQUIRED_VARS XLA_FFI_INCLUDE_DIR
  VERSION_VAR XLA_FFI_VERSION
  REASON_FAILURE_MESSAGE
    "pip install jaxlib and add its site-packages to CMAKE_PREFIX_PATH, or -DXLA_FFI_ROOT=<jax.ffi.include_dir()>"
)

if(XLA_FFI_FOUND AND NOT TARGET XLA::FFI)
  # Imported, so its headers are system headers: their warnings are not ours.
  add_library(XLA::FFI INTERFACE IMPORTED)
  set_target_properties(XLA::FFI PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${XLA_FFI_INCLUDE_DIR})
endif()

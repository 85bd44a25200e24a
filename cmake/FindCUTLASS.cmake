# CUTLASS::CUTLASS, the CUTLASS and CuTe headers: from CUTLASS_ROOT (a checkout; variable or environment), or from the PyPI
# package nvidia-cutlass where the Python packages' directory is on CMAKE_PREFIX_PATH.
find_path(
  CUTLASS_INCLUDE_DIR
  cute/tensor.hpp
  HINTS ${CUTLASS_ROOT}
  ENV CUTLASS_ROOT
  PATH_SUFFIXES include cutlass_library/source/include
)
mark_as_advanced(CUTLASS_INCLUDE_DIR)

if(CUTLASS_INCLUDE_DIR)
  file(
    STRINGS ${CUTLASS_INCLUDE_DIR}/cutlass/version.h
    version_lines
    REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) +[0-9]+"
  )
  string(REGEX MATCHALL "[0-9]+" version_numbers "${version_lines}")
  list(JOIN version_numbers "." CUTLASS_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  CUTLASS
  REQUIRED_VARS CUTLASS_INCLUDE_DIR
  VERSION_VAR CUTLASS_VERSION
  REASON_FAILURE_MESSAGE
    "pip install nvidia-cutlass==4.2.0.0 and add its site-packages to CMAKE_PREFIX_PATH, or -DCUTLASS_ROOT=<checkout>"
)

if(CUTLASS_FOUND AND NOT TARGET CUTLASS::CUTLASS)
  # Imported, so its headers are system headers: their warnings are not ours.
  add_library(CUTLASS::CUTLASS INTERFACE IMPORTED)
  set_target_properties(CUTLASS::CUTLASS PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${CUTLASS_INCLUDE_DIR})
endif()

# PAGETILE_CUDA=OFF in the environment works like -DPAGETILE_CUDA=OFF: it is the shorter one before `pip install .`
# So does PAGETILE_JAX.
if(DEFINED ENV{PAGETILE_CUDA})
  set(cuda_default $ENV{PAGETILE_CUDA})
elseif(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(cuda_default ON)
else()
  set(cuda_default OFF)
endif()

if(DEFINED ENV{PAGETILE_JAX})
  set(jax_default $ENV{PAGETILE_JAX})
else()
  set(jax_default ON)
endif()

option(PAGETILE_CUDA "Build the CUDA kernels (needs nvcc and the CUTLASS headers)" ${cuda_default})
option(PAGETILE_BUILD_PYTHON "Build the Python module" ON)
option(PAGETILE_JAX "Build what pagetile.jax needs, where XLA's FFI headers are found" ${jax_default})
option(PAGETILE_LINEINFO "Line numbers in the CUDA kernels, for profilers" OFF)
option(PAGETILE_WERROR "Compiler warnings are errors" OFF)
option(PAGETILE_COVERAGE "Count executed lines of the C++ code (gcov)" OFF)
option(PAGETILE_SANITIZE "Address and undefined-behaviour sanitizers in the C++ code" OFF)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>")
# Functions that nothing calls stay out of the module.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CXX>:-ffunction-sections;-fdata-sections>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffunction-sections,-fdata-sections>"
)
add_link_options(-Wl,--gc-sections)
set(CMAKE_COMPILE_WARNING_AS_ERROR ${PAGETILE_WERROR})
if(PAGETILE_COVERAGE)
  # The CPU kernels run on several threads: without atomic updates, counts get lost.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:--coverage;-fprofile-update=atomic>")
  add_link_options(--coverage)
endif()
if(PAGETILE_SANITIZE)
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined;-fno-sanitize-recover=undefined;-fno-omit-frame-pointer;-g>"
  )
  add_link_options(-fsanitize=address,undefined)
endif()

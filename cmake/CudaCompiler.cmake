# Finds nvcc: CMAKE_CUDA_COMPILER, CUDACXX or PATH; else the CUDA toolkit that PyPI's nvidia-cuda-nvcc and its companions
# unpack into site-packages/nvidia/cu13 (the Python build asks for them where a machine has no nvcc).
if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER $ENV{CUDACXX})
endif()
if(NOT CMAKE_CUDA_COMPILER)
  find_program(nvcc nvcc PATHS ENV PATH NO_DEFAULT_PATH NO_CACHE)
  find_program(nvcc nvcc PATH_SUFFIXES nvidia/cu13/bin NO_CACHE)
  if(NOT nvcc)
    message(
      FATAL_ERROR
      "No nvcc. Put one on PATH or set CUDACXX; or pip install the packages that tools/build_backend/pagetile_build.py "
      "names and add their site-packages to CMAKE_PREFIX_PATH; or build the CPU part alone with -DPAGETILE_CUDA=OFF"
    )
  endif()
  set(CMAKE_CUDA_COMPILER ${nvcc})
endif()

# The PyPI toolkit has lib/ where nvcc looks in lib64/, and libcudart.so.13 without the plain name that CMake looks for.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH cuda_root)
cmake_path(GET cuda_root PARENT_PATH cuda_root)
file(GLOB cudart ${cuda_root}/lib/libcudart.so.*)
if(cudart AND NOT EXISTS ${cuda_root}/lib64)
  set(CMAKE_CUDA_FLAGS_INIT "-L${cuda_root}/lib")
  set(CUDA_CUDART ${cudart} CACHE FILEPATH "CUDA runtime library (found for its version; the static one is linked)")
endif()

# CMAKE_CUDA_ARCHITECTURES -> PAGETILE_SM80_ARCHITECTURES and PAGETILE_SM90_ARCHITECTURES, one list a kernel family.
#
# sm80: cp.async + mma.sync, which every GPU since Ampere runs. A plain number keeps its PTX beside the machine code, so
#       that GPUs newer than the list still load it. Plain 90 belongs here: it gives the portable kernels machine code on
#       Hopper, for shapes that Hopper's own kernels do not take and for tests that run both families on one GPU.
# sm90: TMA + WGMMA, instructions that only 90a has. Its PTX runs on no other GPU, so it is dropped (90a-real).
#
# Machine code for X.y runs on X.z, z >= y. A family target (100f; CMake >= 4.1) says so by name: 100f serves 100 and 103,
# 120f serves 120 and 121.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  if(DEFINED ENV{CUDAARCHS})
    set(architectures $ENV{CUDAARCHS})
  else()
    set(architectures 80 90a)
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${architectures}" CACHE STRING "GPU architectures to build for")
endif()

set(PAGETILE_SM80_ARCHITECTURES)
set(PAGETILE_SM90_ARCHITECTURES)
foreach(arch IN LISTS CMAKE_CUDA_ARCHITECTURES)
  if(arch MATCHES "^(80|86|89|90|100f?|103f?|120f?|121)(-real|-virtual)?$")
    list(APPEND PAGETILE_SM80_ARCHITECTURES ${arch})
  elseif(arch MATCHES "^90a(-real)?$")
    list(APPEND PAGETILE_SM90_ARCHITECTURES 90a-real)
  else()
    message(
      FATAL_ERROR
      "CMAKE_CUDA_ARCHITECTURES: '${arch}' is not one of 80, 86, 89, 90, 100, 100f, 103, 103f, 120, 120f, 121 (with "
      "-real or -virtual, if wanted; the portable kernels) and 90a (Hopper's own kernels)"
    )
  endif()
endforeach()
if(NOT PAGETILE_SM80_ARCHITECTURES AND NOT PAGETILE_SM90_ARCHITECTURES)
  message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES is empty: name an architecture, or build with -DPAGETILE_CUDA=OFF")
endif()
list(REMOVE_DUPLICATES PAGETILE_SM90_ARCHITECTURES)

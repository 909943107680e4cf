# Whether the GPU path is built: it needs the CUDA toolkit's headers and nvcc, and NCCL's header.
# Nothing is linked to either: driver and NCCL are loaded when there are any (shm/cuda/driver.h).
set(GRADSYNC_CUDA AUTO CACHE STRING "Build the GPU path: ON, OFF, or AUTO (where the toolkit is)")
set_property(CACHE GRADSYNC_CUDA PROPERTY STRINGS AUTO ON OFF)

set(GRADSYNC_HAS_CUDA OFF)
if(GRADSYNC_CUDA)
  find_program(GRADSYNC_NVCC nvcc HINTS ENV CUDA_HOME PATH_SUFFIXES bin PATHS /usr/local/cuda)
  if(GRADSYNC_NVCC)
    file(REAL_PATH ${GRADSYNC_NVCC} nvcc)
    cmake_path(GET nvcc PARENT_PATH toolkit)
    cmake_path(GET toolkit PARENT_PATH toolkit)
  endif()
  find_path(GRADSYNC_CUDA_INCLUDE cuda.h HINTS ${toolkit}/include ${toolkit}/targets/x86_64-linux/include)
  find_path(GRADSYNC_NCCL_INCLUDE nccl.h HINTS ${GRADSYNC_CUDA_INCLUDE})
  if(GRADSYNC_NVCC AND GRADSYNC_CUDA_INCLUDE AND GRADSYNC_NCCL_INCLUDE)
    set(GRADSYNC_HAS_CUDA ON)
  elseif(GRADSYNC_CUDA STREQUAL AUTO)
    message(STATUS "The GPU path is left out: it needs nvcc (${GRADSYNC_NVCC}), cuda.h "
                   "(${GRADSYNC_CUDA_INCLUDE}) and nccl.h (${GRADSYNC_NCCL_INCLUDE})")
  else()
    message(FATAL_ERROR "GRADSYNC_CUDA needs nvcc (${GRADSYNC_NVCC}), cuda.h (${GRADSYNC_CUDA_INCLUDE}) "
                        "and nccl.h (${GRADSYNC_NCCL_INCLUDE})")
  endif()
endif()

if(GRADSYNC_HAS_CUDA)
  add_library(gradsync_cuda_headers INTERFACE)
  target_include_directories(gradsync_cuda_headers SYSTEM INTERFACE
    ${GRADSYNC_CUDA_INCLUDE} ${GRADSYNC_NCCL_INCLUDE})
  target_link_libraries(gradsync_cuda_headers INTERFACE ${CMAKE_DL_LIBS})
endif()

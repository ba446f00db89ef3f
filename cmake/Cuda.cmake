# Decides JAX_FMHA_BUILD_CUDA from JAX_FMHA_CUDA (ON, OFF or AUTO), enables the language, and finds the headers of
# CUTLASS: JAX_FMHA_CUTLASS_INCLUDE, or the wheel nvidia-cutlass of the building Python.
set(JAX_FMHA_CUDA "OFF" CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO (where nvcc and CUTLASS are found)")
set_property(CACHE JAX_FMHA_CUDA PROPERTY STRINGS ON OFF AUTO)
set(JAX_FMHA_CUTLASS_INCLUDE "" CACHE PATH "Headers of CUTLASS 4.2; empty: those of the wheel nvidia-cutlass")
set(JAX_FMHA_INSTANCES "" CACHE STRING
    "Regular expression: build only these rows of instances.def. A library with a part of them fails on other calls")

set(JAX_FMHA_BUILD_CUDA OFF)
if(NOT JAX_FMHA_CUDA STREQUAL "AUTO" AND NOT JAX_FMHA_CUDA)
  message(STATUS "jax_fmha: building without CUDA kernels (JAX_FMHA_CUDA=OFF)")
  return()
endif()

# nvcc: CUDACXX, CUDA_HOME or PATH, else the wheels nvidia-cuda-nvcc and its companions.
if(NOT CMAKE_CUDA_COMPILER AND DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER $ENV{CUDACXX})
elseif(NOT CMAKE_CUDA_COMPILER)
  find_program(JAX_FMHA_NVCC nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  find_package(Python 3.11 COMPONENTS Interpreter)
  if(NOT JAX_FMHA_NVCC AND Python_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], 'cu13'))"
      OUTPUT_VARIABLE wheels OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_program(JAX_FMHA_NVCC nvcc PATHS ${wheels} PATH_SUFFIXES bin NO_DEFAULT_PATH)
  endif()
  if(JAX_FMHA_NVCC)
    set(CMAKE_CUDA_COMPILER ${JAX_FMHA_NVCC})
  endif()
endif()
# The wheels keep their libraries where their own nvcc does not look.
cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH libraries)
cmake_path(SET libraries NORMALIZE "${libraries}/../lib")
if(EXISTS "${libraries}/libcudart_static.a")
  set(CMAKE_CUDA_FLAGS_INIT "-L${libraries}")
endif()

if(NOT JAX_FMHA_CUTLASS_INCLUDE)
  find_package(Python 3.11 COMPONENTS Interpreter)
  if(Python_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
      OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(JAX_FMHA_CUTLASS_INCLUDE "${wheel}/source/include")
  endif()
endif()

set(missing)
if(NOT CMAKE_CUDA_COMPILER)
  list(APPEND missing "nvcc (put it on PATH, set CUDA_HOME, or pip install the wheels of cmake/cuda_wheels.py)")
endif()
if(NOT EXISTS "${JAX_FMHA_CUTLASS_INCLUDE}/cute/tensor.hpp")
  list(APPEND missing "the headers of CUTLASS (pip install nvidia-cutlass==4.2.0.0, or set JAX_FMHA_CUTLASS_INCLUDE)")
endif()
if(NOT missing)
  set(JAX_FMHA_BUILD_CUDA ON)
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # every target names its own
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
    # A quarter of the size. Drivers that run code of this compiler know it.
    add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  # Lines, for profilers and racecheck, are most of a library that has them.
  add_compile_options($<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:RelWithDebInfo>>:-lineinfo>)
elseif(JAX_FMHA_CUDA STREQUAL "AUTO")
  list(JOIN missing ", " missing)
  message(STATUS "jax_fmha: building without CUDA kernels; not found: ${missing}")
else()
  list(JOIN missing ", " missing)
  message(FATAL_ERROR "JAX_FMHA_CUDA=${JAX_FMHA_CUDA}: not found: ${missing}")
endif()

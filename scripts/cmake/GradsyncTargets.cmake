# How every target of the project is compiled, and the few functions that declare them.
include(GNUInstallDirs)
include(CheckCXXCompilerFlag)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

find_program(GRADSYNC_CCACHE ccache)
if(GRADSYNC_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${GRADSYNC_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${GRADSYNC_CCACHE})
endif()

find_package(Threads REQUIRED)

# What each of our own targets is compiled with. Third-party headers are SYSTEM, so not judged.
add_library(gradsync_options INTERFACE)
target_compile_options(gradsync_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Wold-style-cast -Wcast-align -Woverloaded-virtual
  -Wconversion -Wno-sign-conversion -Werror
  $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>
  # GCC 12 at -O2 and above sees overlapping copies in "text" + std::to_string(n) (its bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
target_include_directories(gradsync_options INTERFACE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/client/include)
if(GRADSYNC_SANITIZE)
  add_compile_options(-fsanitize=${GRADSYNC_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -O1)
  add_link_options(-fsanitize=${GRADSYNC_SANITIZE})
  if(GRADSYNC_SANITIZE MATCHES thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # GCC's does not see fences. The engine's order what only another process ever reads, after this
    # one died; Abseil's flags are set before there is a second thread.
    add_compile_options(-Wno-tsan)
  endif()
endif()

# gradsync_library(NAME SOURCES... [DEPS targets...]): an internal static library of one folder.
function(gradsync_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC gradsync_options ${ARG_DEPS} Threads::Threads)
endfunction()

# gradsync_tests(NAME SOURCES... [DEPS targets...] [LABELS labels...] [SERIAL] [TIMEOUT s] [ENVIRONMENT NAME=value...]): one
# GoogleTest binary for a folder, each test of it known to ctest. SERIAL: real processes or clocks.
# ENVIRONMENT: variables of its tests.
function(gradsync_tests name)
  if(NOT GRADSYNC_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "SERIAL" "TIMEOUT" "SOURCES;DEPS;LABELS;ENVIRONMENT" ${ARGN})
  find_package(GTest REQUIRED)
  include(GoogleTest)
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE gradsync_options ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  set(properties TIMEOUT 120)
  if(ARG_TIMEOUT)
    set(properties TIMEOUT ${ARG_TIMEOUT})
  endif()
  if(ARG_SERIAL)
    list(APPEND properties RUN_SERIAL ON)
  endif()
  if(ARG_LABELS)
    list(APPEND properties LABELS "${ARG_LABELS}")
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES ${properties})
  if(ARG_ENVIRONMENT)
    # By a file that ctest reads behind the list of tests: as a property above, only the first variable
    # would arrive.
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${name}_environment.cmake)
    file(GENERATE OUTPUT ${file} CONTENT
      "if(${name}_TESTS)\n  set_tests_properties(\${${name}_TESTS} PROPERTIES ENVIRONMENT \"${ARG_ENVIRONMENT}\")\nendif()\n")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${file})
  endif()
endfunction()

# gradsync_movable(NAME): a program that also runs where scripts/bundle has put it, with the libraries
# that it needs in a lib/ beside its folder. The old kind of tag, because the new one does not hold for
# what those libraries need themselves.
function(gradsync_movable name)
  if(TARGET ${name})
    set_target_properties(${name} PROPERTIES BUILD_RPATH "$ORIGIN/../lib" INSTALL_RPATH "$ORIGIN/../lib")
    target_link_options(${name} PRIVATE LINKER:--disable-new-dtags)
  endif()
endfunction()

# gradsync_benchmark(NAME SOURCES... [DEPS targets...]): a Google Benchmark binary.
function(gradsync_benchmark name)
  if(NOT GRADSYNC_BENCH)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  find_package(benchmark REQUIRED)
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE gradsync_options ${ARG_DEPS} benchmark::benchmark_main)
endfunction()

# cmake -DBUILD_DIR=... -DWORK_DIR=... ... -P install_test.cmake: see CMakeLists.txt for the arguments.
cmake_minimum_required(VERSION 3.25)

set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})

# run(WHAT COMMAND...): `output` is what it printed; any failure ends the test.
function(run what)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE output ERROR_VARIABLE errors RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${what} failed (${result}):\n${output}\n${errors}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(expect_version what)
  if(NOT output STREQUAL "tessera ${VERSION}: 2.5\n")
    message(FATAL_ERROR "${what} printed '${output}', expected 'tessera ${VERSION}: 2.5'")
  endif()
endfunction()

run("cmake --install" ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix})
# A tree that is moved must keep working.
file(RENAME ${prefix} ${WORK_DIR}/moved)
set(prefix ${WORK_DIR}/moved)
set(ENV{LD_LIBRARY_PATH} ${prefix}/${LIBDIR})

file(GLOB license ${prefix}/share/doc/*/LICENSE)
if(NOT license)
  message(FATAL_ERROR "no LICENSE below ${prefix}/share/doc")
endif()

# C++ by find_package.
run("configuring the C++ program" ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE_DIR}/consumer -B ${WORK_DIR}/consumer
  -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_PREFIX_PATH=${prefix} -DTESSERA_VERSION=${VERSION})
run("building the C++ program" ${CMAKE_COMMAND} --build ${WORK_DIR}/consumer)
run("the C++ program" ${WORK_DIR}/consumer/consumer)
expect_version("the C++ program")

# C by pkg-config.
set(ENV{PKG_CONFIG_PATH} ${prefix}/${LIBDIR}/pkgconfig)
run("pkg-config --modversion" ${PKG_CONFIG} --modversion tessera)
if(NOT output STREQUAL "${VERSION}\n")
  message(FATAL_ERROR "pkg-config says version '${output}', expected '${VERSION}'")
endif()
run("pkg-config" ${PKG_CONFIG} --cflags --libs tessera)
separate_arguments(flags UNIX_COMMAND "${output}")
run("compiling the C program" ${C_COMPILER} -std=c11 -Wall -Wextra -Wpedantic -Werror ${SOURCE_DIR}/consumer/main.c
  -o ${WORK_DIR}/consumer_c ${flags})
run("the C program" ${WORK_DIR}/consumer_c)
expect_version("the C program")

if(NOT SHARED)
  return()
endif()

set(library ${prefix}/${LIBDIR}/libtessera.so)
run("nm" ${NM} -D --defined-only ${library})
string(REGEX MATCHALL "[^\n]+" symbols "${output}")
set(count 0)
foreach(symbol ${symbols})
  if(NOT symbol MATCHES " tessera_[a-z0-9_]+$")
    message(FATAL_ERROR "the library exports '${symbol}', which is not of the C interface")
  endif()
  math(EXPR count "${count} + 1")
endforeach()
if(count LESS 10)
  message(FATAL_ERROR "the library exports ${count} symbols only:\n${output}")
endif()

run("readelf" ${READELF} -d ${library})
# Before 1.0 a minor version may change the interface: what was linked with 0.1 must not find 0.2.
string(REGEX MATCH "^0\\.[0-9]+|^[1-9][0-9]*" compatible ${VERSION})
string(FIND "${output}" "soname: [libtessera.so.${compatible}]" at)
if(at EQUAL -1)
  message(FATAL_ERROR "readelf names no soname libtessera.so.${compatible}:\n${output}")
endif()
string(REGEX MATCHALL "Shared library: \\[[^]]+" needed "${output}")
foreach(entry ${needed})
  if(NOT entry MATCHES "\\[(libc|libm|libstdc\\+\\+|libgcc_s|libpthread|ld-linux[-a-z0-9_]*)\\.so")
    message(FATAL_ERROR "the library needs more than the standard library: ${entry}]")
  endif()
endforeach()
if(NOT needed)
  message(FATAL_ERROR "readelf names no needed library:\n${output}")
endif()

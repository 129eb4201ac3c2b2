# cmake -DWORK_DIR=... ... -P install_test.cmake: see CMakeLists.txt for the arguments. Tests the files that `make
# install` builds and installs, found and run by programs that know only the prefix: LD_LIBRARY_PATH is not set.
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

file(REMOVE_RECURSE ${WORK_DIR} ${BUILD_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})
unset(ENV{LD_LIBRARY_PATH})
set(build ${BUILD_DIR})

# ---- shared, in two layouts ----

# As `make install` does it; a tree that is moved must keep working.
function(install_into name libdir)
  run("configuring for ${libdir}" ${CMAKE_COMMAND} --preset install -S ${ROOT} -B ${build}
    -DCMAKE_INSTALL_PREFIX=${WORK_DIR}/${name} -DCMAKE_INSTALL_LIBDIR=${libdir}
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
  run("building" ${CMAKE_COMMAND} --build ${build})
  run("cmake --install" ${CMAKE_COMMAND} --install ${build})
  file(RENAME ${WORK_DIR}/${name} ${WORK_DIR}/${name}-moved)
endfunction()

foreach(libdir lib ${OTHER_LIBDIR})
  string(MAKE_C_IDENTIFIER ${libdir} name)
  install_into(${name} ${libdir})
  set(prefix ${WORK_DIR}/${name}-moved)
  run("tessera info" ${prefix}/bin/tessera info)
  if(NOT output MATCHES "^tessera +${VERSION}\n")
    message(FATAL_ERROR "tessera info printed:\n${output}")
  endif()
  build_and_run_programs(${prefix} ${libdir})
endforeach()

set(libdir ${OTHER_LIBDIR}) # the last
file(GLOB license ${prefix}/share/doc/*/LICENSE)
if(NOT license)
  message(FATAL_ERROR "no LICENSE below ${prefix}/share/doc")
endif()
file(GLOB_RECURSE installed RELATIVE ${prefix} ${prefix}/*)
foreach(file ${installed})
  set(of_library "${libdir}/(libtessera\\.so|cmake/tessera/|pkgconfig/tessera\\.pc)")
  if(NOT file MATCHES "^(bin/tessera$|include/tessera/|${of_library}|share/doc/tessera/)")
    message(FATAL_ERROR "unexpected: ${file} is installed")
  endif()
endforeach()

set(library ${prefix}/${libdir}/libtessera.so)
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

# What is for tests alone is in no library that is installed, nor does anything in the environment ask for it.
run("nm" ${NM} -C ${library})
if(output MATCHES "([^\n]*emulat[^\n]*)")
  message(FATAL_ERROR "the library holds '${CMAKE_MATCH_1}'")
endif()
run("tessera info" ${prefix}/bin/tessera info --json)
string(JSON limit GET "${output}" cpu isa_limit)
set(ENV{TESSERA_AMX} emulated)
run("tessera info" ${prefix}/bin/tessera info --json)
string(JSON limit_when_asked GET "${output}" cpu isa_limit)
unset(ENV{TESSERA_AMX})
if(NOT limit STREQUAL limit_when_asked)
  message(FATAL_ERROR "TESSERA_AMX=emulated turns ${limit} into ${limit_when_asked}")
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

# ---- static ----

run("configuring a static library" ${CMAKE_COMMAND} --preset install -S ${ROOT} -B ${build}
  -DCMAKE_INSTALL_PREFIX=${WORK_DIR}/static -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF -DTESSERA_BUILD_CLI=OFF)
run("building a static library" ${CMAKE_COMMAND} --build ${build})
run("cmake --install" ${CMAKE_COMMAND} --install ${build})
if(NOT EXISTS ${WORK_DIR}/static/lib/libtessera.a)
  message(FATAL_ERROR "no libtessera.a is installed")
endif()
build_and_run_programs(${WORK_DIR}/static lib)

# cmake -DWORK_DIR=... ... -P embedded_test.cmake: Tessera inside another project, by add_subdirectory and by
# FetchContent. The host's cache, targets and installation stay its own.
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

file(REMOVE_RECURSE ${WORK_DIR} ${BUILD_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})
unset(ENV{LD_LIBRARY_PATH})

function(configure name)
  run("configuring the host, ${name}" ${CMAKE_COMMAND} --fresh -G ${GENERATOR} -S ${SOURCE_DIR}/host -B ${BUILD_DIR}
    -DTESSERA_ROOT=${ROOT} -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
    -DCMAKE_INSTALL_PREFIX=${WORK_DIR}/prefix-${name} ${ARGN})
  set(output "${output}" PARENT_SCOPE)
endfunction()

configure(subdirectory -DMETHOD=subdirectory -DEXPECTED_TYPE=STATIC_LIBRARY)
configure(shared -DMETHOD=subdirectory -DBUILD_SHARED_LIBS=ON -DEXPECTED_TYPE=SHARED_LIBRARY)
configure(asked -DMETHOD=fetched -DTESSERA_INSTALL=ON -DEXPECTED_TYPE=STATIC_LIBRARY)
configure(fetched -DMETHOD=fetched -DBUILD_SHARED_LIBS=OFF -DEXPECTED_TYPE=STATIC_LIBRARY)

# The last of them whole: what is installed is the host's alone.
run("building the host" ${CMAKE_COMMAND} --build ${BUILD_DIR})
run("installing the host" ${CMAKE_COMMAND} --install ${BUILD_DIR})
set(prefix ${WORK_DIR}/prefix-fetched)
run("the host" ${prefix}/bin/host)
if(NOT output STREQUAL "tessera ${VERSION}: 2.5\n")
  message(FATAL_ERROR "the host printed '${output}'")
endif()
file(GLOB_RECURSE installed RELATIVE ${prefix} ${prefix}/*)
if(NOT installed STREQUAL "bin/host")
  message(FATAL_ERROR "the host installs ${installed}, expected bin/host alone")
endif()

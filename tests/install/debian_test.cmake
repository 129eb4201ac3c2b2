# cmake -DWORK_DIR=... ... -P debian_test.cmake: the packages that `make deb` builds, installed by dpkg into a folder of
# their own (as far as dpkg can without a whole system below it), and used there.
cmake_minimum_required(VERSION 3.25)
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})
unset(ENV{LD_LIBRARY_PATH})
string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor ${VERSION})
set(library libtessera${minor})

run("configuring" ${CMAKE_COMMAND} --preset install -S ${ROOT} -B ${BUILD_DIR} -DCMAKE_INSTALL_PREFIX=/usr
  -DCMAKE_INSTALL_LIBDIR=${OTHER_LIBDIR} -DBUILD_SHARED_LIBS=ON -DTESSERA_BUILD_CLI=ON
  -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
run("building" ${CMAKE_COMMAND} --build ${BUILD_DIR})
run("cpack" ${CPACK} --config ${BUILD_DIR}/CPackConfig.cmake -G DEB -B ${WORK_DIR}/packages)
file(GLOB packages RELATIVE ${WORK_DIR}/packages ${WORK_DIR}/packages/*.deb)
set(names)
foreach(package ${packages})
  run("dpkg-deb ${package}" ${DPKG_DEB} --show --showformat "\${Package} \${Version} \${Depends}"
    ${WORK_DIR}/packages/${package})
  if(NOT output MATCHES "^([a-z0-9.-]+) ${VERSION} (.*)$")
    message(FATAL_ERROR "${package} is '${output}', expected version ${VERSION}")
  endif()
  set(name ${CMAKE_MATCH_1})
  set(depends "${CMAKE_MATCH_2}")
  list(APPEND names ${name})
  string(FIND "${depends}" "${library} (= ${VERSION})" on_library)
  if(name STREQUAL library AND NOT depends MATCHES "libc6 \\(>= " OR NOT name STREQUAL library AND on_library EQUAL -1)
    message(FATAL_ERROR "${name} depends on '${depends}'")
  endif()
endforeach()
if(NOT names STREQUAL "libtessera-dev;${library};tessera")
  message(FATAL_ERROR "the packages are ${names}")
endif()

# Nothing but what they depend on is missing below an empty root.
set(root ${WORK_DIR}/root)
foreach(folder info updates triggers)
  file(MAKE_DIRECTORY ${root}/var/lib/dpkg/${folder})
endforeach()
file(TOUCH ${root}/var/lib/dpkg/status)
list(TRANSFORM packages PREPEND ${WORK_DIR}/packages/)
run("dpkg --install" ${DPKG} --root=${root} --log=${WORK_DIR}/log --force-not-root --force-depends
  --force-script-chrootless --no-triggers --install ${packages})
run("tessera info" ${root}/usr/bin/tessera info)
if(NOT output MATCHES "^tessera +${VERSION}\n")
  message(FATAL_ERROR "tessera info printed:\n${output}")
endif()
file(GLOB licences RELATIVE ${root}/usr/share/doc ${root}/usr/share/doc/*/*)
if(NOT licences STREQUAL "libtessera-dev/copyright;${library}/copyright;tessera/copyright")
  message(FATAL_ERROR "below /usr/share/doc are ${licences}")
endif()
set(ENV{LD_LIBRARY_PATH} ${root}/usr/${OTHER_LIBDIR}) # ldconfig knows the machine's own root
build_and_run_programs(${root}/usr ${OTHER_LIBDIR})

run("dpkg --purge" ${DPKG} --root=${root} --log=${WORK_DIR}/log --force-not-root --force-script-chrootless --no-triggers
  --purge tessera libtessera-dev ${library})
file(GLOB_RECURSE left ${root}/usr/*)
if(left)
  message(FATAL_ERROR "after dpkg --purge ${left} is left")
endif()

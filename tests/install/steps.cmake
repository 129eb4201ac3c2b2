# run(WHAT COMMAND...): `output` receives the command's output; any failure ends the test.
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

# C++ by find_package and C by pkg-config, against what lies in `prefix`.
function(build_and_run_programs prefix libdir)
  set(programs ${WORK_DIR}/programs)
  file(REMOVE_RECURSE ${programs})
  run("configuring the C++ program" ${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE_DIR}/consumer -B ${programs}
    -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_PREFIX_PATH=${prefix} -DTESSERA_VERSION=${VERSION})
  run("building the C++ program" ${CMAKE_COMMAND} --build ${programs})
  run("the C++ program" ${programs}/consumer)
  expect_version("the C++ program")

  set(ENV{PKG_CONFIG_PATH} ${prefix}/${libdir}/pkgconfig)
  run("pkg-config --modversion" ${PKG_CONFIG} --modversion tessera)
  if(NOT output STREQUAL "${VERSION}\n")
    message(FATAL_ERROR "pkg-config says version '${output}', expected '${VERSION}'")
  endif()
  run("pkg-config" ${PKG_CONFIG} --cflags --libs tessera)
  separate_arguments(flags UNIX_COMMAND "${output}")
  run("compiling the C program" ${C_COMPILER} -std=c11 -Wall -Wextra -Wpedantic -Werror ${SOURCE_DIR}/consumer/main.c
    -o ${programs}/consumer_c ${flags})
  run("the C program" ${programs}/consumer_c)
  expect_version("the C program")
endfunction()

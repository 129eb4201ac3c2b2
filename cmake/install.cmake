# cmake --install: the library, its headers, the program, and the files for find_package(tessera) and pkg-config.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

install(TARGETS tessera EXPORT tesseraTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library NAMELINK_COMPONENT development
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT library
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# The program finds the library relative to its own path, wherever the tree is installed.
if(TARGET tessera_cli)
  if(NOT DEFINED CMAKE_INSTALL_RPATH)
    file(RELATIVE_PATH library_from_program ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
    set_target_properties(tessera_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${library_from_program}")
  endif()
  install(TARGETS tessera_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
install(DIRECTORY ${TESSERA_PREBUILT_FOLDER}/ DESTINATION ${CMAKE_INSTALL_LIBDIR}/tessera/aot OPTIONAL
  COMPONENT library)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${package_dir} COMPONENT development)
configure_package_config_file(cmake/tesseraConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT development)

# A tree that is moved as a whole keeps working: paths are relative to the folder of tessera.pc. A program linked with
# it starts without further settings: the library's folder is its RUNPATH, except for the loader's own folders.
foreach(folder LIBDIR INCLUDEDIR)
  file(RELATIVE_PATH pc_${folder} ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_FULL_${folder}})
  string(REGEX REPLACE "/$" "" pc_${folder} "${pc_${folder}}")
endforeach()
set(pc_libs "-L\${libdir} -ltessera")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND pc_libs " -lstdc++ -lm -pthread -ldl")
elseif(NOT CMAKE_INSTALL_FULL_LIBDIR MATCHES "^(/usr)?/lib(64|32)?(/[^/]*-linux-gnu[^/]*)?$")
  string(PREPEND pc_libs "-Wl,-rpath,\${libdir} ")
endif()
configure_file(cmake/tessera.pc.in ${CMAKE_CURRENT_BINARY_DIR}/cmake/tessera.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cmake/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
  COMPONENT development)
if(PROJECT_IS_TOP_LEVEL)
  include(cmake/debian.cmake)
endif()

# cmake --install: the library, its headers, the program, and what find_package(tessera) and pkg-config need.
include(CMakePackageConfigHelpers)

install(TARGETS tessera EXPORT tesseraTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${package_dir})
configure_package_config_file(cmake/tesseraConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake
  DESTINATION ${package_dir})

# A tree that is moved as a whole keeps working: paths are relative to where tessera.pc lies.
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
if(BUILD_SHARED_LIBS)
  set(pc_libs "-L\${libdir} -ltessera")
else()
  set(pc_libs "-L\${libdir} -ltessera -lstdc++ -lm -pthread")
endif()
configure_file(cmake/tessera.pc.in ${CMAKE_CURRENT_BINARY_DIR}/cmake/tessera.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cmake/tessera.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

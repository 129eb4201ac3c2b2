# make deb (cpack -G DEB): Debian packages of what is installed, each part's files by its component. The library's name
# has its soname, so that programs linked with an older minor version keep theirs.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME tessera)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGE_CONTACT "The Tessera authors <tessera@localhost>") # a maintainer of a distribution sets the field
set(CPACK_COMPONENTS_ALL library development)
if(TARGET tessera_cli)
  list(APPEND CPACK_COMPONENTS_ALL program)
endif()
set(CPACK_COMPONENT_LIBRARY_DESCRIPTION "Exact attention without the score matrix, on CPUs and NVIDIA GPUs: the library
 and, where they were built, prebuilt CUDA kernels. It opens a GPU's driver when it runs.")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "Exact attention without the score matrix: headers for C and C++, and the
 files for find_package(tessera) and pkg-config.")
set(CPACK_COMPONENT_PROGRAM_DESCRIPTION "Exact attention without the score matrix: the program tessera, which plans,
 runs, compares and traces attention.")

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
get_target_property(soversion tessera SOVERSION)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME libtessera${soversion})
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libtessera-dev)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_NAME tessera)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SECTION science)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}/src)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
# An interface is that of its exact version: structs and plans have theirs.
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY "=")
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS ON)
set(CPACK_COMPONENT_DEVELOPMENT_DEPENDS library)
set(CPACK_COMPONENT_PROGRAM_DEPENDS library)
set(CPACK_DEBIAN_PROGRAM_PACKAGE_RECOMMENDS libopenblas0) # what `tessera compare` opens to compare with
set(CPACK_STRIP_FILES ON)
# Where Debian has a package's licence: two versions of the library can be installed beside each other.
set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/cmake/debian_copyright.cmake)
include(CPack)

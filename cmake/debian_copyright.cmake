# Run by cpack on the files of each package before it is written: the licence is in share/doc/PACKAGE/copyright.
foreach(component ${CPACK_COMPONENTS_ALL})
  string(TOUPPER ${component} upper)
  set(files ${CPACK_TEMPORARY_DIRECTORY}/${component}/usr/share/doc)
  file(REMOVE_RECURSE ${files}/${CPACK_PACKAGE_NAME})
  configure_file(${CMAKE_CURRENT_LIST_DIR}/../LICENSE ${files}/${CPACK_DEBIAN_${upper}_PACKAGE_NAME}/copyright COPYONLY)
endforeach()

# cmake -DROOT=... -DOUT=... -P embed_kernels.cmake: every header below ROOT, as text in one C++ file. Comments, empty
# lines, indentation, spaces around operators and after commas, and the messages of static assertions are left out, so
# they neither take half of the text nor change the hash of a compiled kernel.
file(GLOB_RECURSE headers RELATIVE ${ROOT} ${ROOT}/*.hpp ${ROOT}/*.cuh)
list(SORT headers)
list(LENGTH headers count)
set(text "// Written by cmake/embed_kernels.cmake.\n#include \"cuda/runtime/sources.hpp\"\n\n")
string(APPEND text "namespace tessera::cuda {\n\n")
string(APPEND text "const KernelHeader kKernelHeaders[] = {\n")
foreach(header ${headers})
  # Semicolons and brackets have a meaning in CMake's lists, so the text is never split.
  file(READ ${ROOT}/${header} content)
  string(REGEX REPLACE "[ \t]*//[^\n]*" "" content "${content}")
  string(REGEX REPLACE "\n[ \t]+" "\n" content "${content}")
  string(REGEX REPLACE "\n\n+" "\n" content "${content}")
  string(REPLACE ", " "," content "${content}")
  string(REGEX REPLACE ",[ \n]*\"[^\"\n]*\"\\);" ");" content "${content}")
  # An operand may be that of two operators.
  foreach(pass RANGE 1)
    string(REGEX REPLACE "([A-Za-z0-9_)]) ([=+*/<>&|?:!-]+) ([A-Za-z0-9_(!{])" "\\1\\2\\3" content "${content}")
  endforeach()
  string(REPLACE ") {" "){" content "${content}")
  string(APPEND text "    {\"${header}\", R\"tessera(${content})tessera\"},\n")
endforeach()
string(APPEND text "};\nconst int kNumKernelHeaders = ${count};\n\n}  // namespace tessera::cuda\n")
file(WRITE ${OUT} "${text}")

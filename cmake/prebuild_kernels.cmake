# cmake -DAOT=... -DFOLDER=... -DARCHS=... -DPYTHON=... -P prebuild_kernels.cmake: the program AOT compiles the common
# kernels of ARCHS into FOLDER. NVRTC is the one named by TESSERA_NVRTC, otherwise the newest in the environment of
# PYTHON, where pip installs it beside PyTorch, otherwise the one that the library finds by itself.
if(PYTHON AND "$ENV{TESSERA_NVRTC}" STREQUAL "")
  execute_process(COMMAND ${PYTHON} -c [[
import glob, site, sys, sysconfig
paths = sysconfig.get_paths()
folders = dict.fromkeys([paths["purelib"], paths["platlib"], *site.getsitepackages(), *sys.path])
for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
    for folder in filter(None, folders):
        for below in ("cu13", "cuda_nvrtc"):
            for path in glob.glob(f"{glob.escape(folder)}/nvidia/{below}/lib/{name}"):
                print(path)
                sys.exit()
]] OUTPUT_VARIABLE nvrtc OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(nvrtc)
    set(ENV{TESSERA_NVRTC} ${nvrtc})
  endif()
endif()
execute_process(COMMAND ${AOT} ${FOLDER} ${ARCHS} COMMAND_ERROR_IS_FATAL ANY)

/* A libnvrtc.so.13 that compiles nothing. It tells that it was opened by a line in the file FAKE_NVRTC_OPENED. */
#include <stdio.h>
#include <stdlib.h>

__attribute__((constructor)) static void opened(void) {
  const char* path = getenv("FAKE_NVRTC_OPENED");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (file) fputs("opened\n", file), fclose(file);
}

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
const char* nvrtcGetErrorString(int result) { return (void)result, "pretended"; }
int nvrtcGetNumSupportedArchs(int* count) { return *count = 1, 0; }
int nvrtcGetSupportedArchs(int* archs) { return *archs = 90, 0; }

#define REFUSED(name) \
  int name(void) { return 1; }
REFUSED(nvrtcCreateProgram)
REFUSED(nvrtcDestroyProgram)
REFUSED(nvrtcCompileProgram)
REFUSED(nvrtcGetProgramLogSize)
REFUSED(nvrtcGetProgramLog)
REFUSED(nvrtcGetCUBINSize)
REFUSED(nvrtcGetCUBIN)

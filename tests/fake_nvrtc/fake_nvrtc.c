/* A libnvrtc.so.13. It tells that it was opened by a line in the file FAKE_NVRTC_OPENED. With FAKE_NVRTC_COMPILES it
   "compiles" every source into the name of its target, "sm_90a"; otherwise it refuses each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((constructor)) static void opened(void) {
  const char* path = getenv("FAKE_NVRTC_OPENED");
  FILE* file = path ? fopen(path, "a") : NULL;
  if (file) fputs("opened\n", file), fclose(file);
}

enum { kRefused = 1 };
typedef struct {
  char symbol[64], target[32], log[256];
} Program;

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
const char* nvrtcGetErrorString(int result) { return (void)result, "pretended"; }

static const int kArchs[] = {80, 86, 89, 90, 100, 120};
enum { kNumArchs = sizeof kArchs / sizeof *kArchs };
int nvrtcGetNumSupportedArchs(int* count) { return *count = kNumArchs, 0; }
int nvrtcGetSupportedArchs(int* archs) { return memcpy(archs, kArchs, sizeof kArchs), 0; }

int nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers, const char* const* texts,
                       const char* const* names) {
  (void)source, (void)headers, (void)texts, (void)names;
  if (!getenv("FAKE_NVRTC_COMPILES")) return kRefused;
  *program = calloc(1, sizeof **program);
  snprintf((*program)->symbol, sizeof(*program)->symbol, "%.*s", (int)strcspn(name, "."), name);
  return 0;
}
int nvrtcDestroyProgram(Program** program) { return free(*program), *program = NULL, 0; }

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  static const char arch[] = "--gpu-architecture=";
  for (int i = 0; i < count; ++i) {
    if (strncmp(options[i], arch, sizeof arch - 1) != 0) continue;
    snprintf(program->target, sizeof program->target, "%s", options[i] + sizeof arch - 1);
  }
  snprintf(program->log, sizeof program->log,
           "ptxas info    : Compiling entry function '%s' for '%s'\n"
           "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
           "ptxas info    : Used 32 registers\n",
           program->symbol, program->target);
  return 0;
}
int nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = strlen(program->log) + 1, 0; }
int nvrtcGetProgramLog(Program* program, char* log) { return strcpy(log, program->log), 0; }
int nvrtcGetCUBINSize(Program* program, size_t* size) { return *size = strlen(program->target) + 1, 0; }
int nvrtcGetCUBIN(Program* program, char* code) { return strcpy(code, program->target), 0; }
int nvrtcGetPTXSize(Program* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(Program* program, char* code) { return nvrtcGetCUBIN(program, code); }

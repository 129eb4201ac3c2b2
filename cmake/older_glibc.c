// Functions that glibc has only since 2.29 or later, for wheels that must load with an older glibc
// (scripts/glibc_stubs.py): those that the library and a wheel's C++ library call, implemented by functions of older
// versions.
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/random.h>
#include <sys/stat.h>

#define HIDDEN __attribute__((visibility("hidden")))

#if defined(__x86_64__)
#define STAT_VERSION 1
#else
#define STAT_VERSION 0
#endif

int __xstat(int version, const char* path, struct stat* info);
int __fxstat(int version, int file, struct stat* info);
int __lxstat(int version, const char* path, struct stat* info);
int __fxstatat(int version, int folder, const char* path, struct stat* info, int flags);

// Exported functions since 2.33.
HIDDEN int stat(const char* path, struct stat* info) { return __xstat(STAT_VERSION, path, info); }
HIDDEN int fstat(int file, struct stat* info) { return __fxstat(STAT_VERSION, file, info); }
HIDDEN int lstat(const char* path, struct stat* info) { return __lxstat(STAT_VERSION, path, info); }
HIDDEN int fstatat(int folder, const char* path, struct stat* info, int flags) {
  return __fxstatat(STAT_VERSION, folder, path, info, flags);
}
// The same structure if a word has 64 bits.
HIDDEN int stat64(const char* path, void* info) { return __xstat(STAT_VERSION, path, info); }
HIDDEN int fstat64(int file, void* info) { return __fxstat(STAT_VERSION, file, info); }

// Since 2.32: true if the process has a single thread. 0 is always correct.
HIDDEN char __libc_single_threaded = 0;

// Since 2.36, for std::random_device.
HIDDEN uint32_t arc4random(void) {
  uint32_t value = 0;
  while (getentropy(&value, sizeof value) != 0) {
  }
  return value;
}

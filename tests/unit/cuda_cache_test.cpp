// The disk cache of compiled kernels, with a compiler that only pretends: many threads and processes, a crash in the
// middle, damaged entries, folders that cannot be written, a full disk.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/status.hpp"
#include "cuda/cache.hpp"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

CacheKey key_of(int number, int32_t compiler = 13000) {
  Hasher hasher;
  hasher.number(number);
  return {hasher.digest(), compiler};
}

// What a key's compilation gives: as long as a small cubin, and different for each key.
Binary binary_of(int number) {
  Binary binary;
  binary.symbol = "tessera_pretended";
  binary.config = "tessera::Config{" + std::to_string(number) + "}";
  binary.cubin.assign(40000, static_cast<char>('a' + number % 26));
  binary.cubin += std::to_string(number);
  binary.arch = 90;
  binary.registers = 100 + number;
  binary.spill_bytes = 8;
  binary.stack_bytes = 16;
  return binary;
}

void expect_same(const Binary& binary, int number) {
  const Binary expected = binary_of(number);
  EXPECT_EQ(binary.symbol, expected.symbol);
  EXPECT_EQ(binary.config, expected.config);
  EXPECT_EQ(binary.cubin, expected.cubin);
  EXPECT_EQ(binary.arch, expected.arch);
  EXPECT_EQ(binary.registers, expected.registers);
  EXPECT_EQ(binary.spill_bytes, expected.spill_bytes);
  EXPECT_EQ(binary.stack_bytes, expected.stack_bytes);
}

// Runs `body` in a process of its own; 0 when it answers true.
pid_t in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  return child;
}
int exit_of(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

class CudaCache : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "tessera-cache-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root = pattern;
    folder = root / "below" / "it";
  }
  void TearDown() override {
    std::error_code ignored;
    fs::permissions(root, fs::perms::owner_all, ignored);
    fs::remove_all(root, ignored);
  }

  // The key's binary by way of `cache`; how often it had to be compiled.
  int get(Cache& cache, int number) {
    int compiled = 0;
    Binary binary;
    const auto compile = [&](Binary& out) {
      ++compiled;
      out = binary_of(number);
      return ok();
    };
    EXPECT_EQ(cache.get(key_of(number), compile, binary).code, TESSERA_OK);
    expect_same(binary, number);
    return compiled;
  }
  int get_anew(int number) {
    Cache cache(folder);
    return get(cache, number);
  }
  fs::path entry(int number) const { return folder / key_of(number).file_name(); }
  int files() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
  }
  void overwrite(const fs::path& path, const std::string& data) { std::ofstream(path, std::ios::binary) << data; }
  std::string content(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  fs::path root, folder;
};

TEST(CudaHash, IsFnv1aOf128Bits) {
  // http://www.isthe.com/chongo/src/fnv/test_fnv.c
  const auto hash = [](std::string_view text) {
    Hasher hasher;
    hasher.bytes(text);
    return hasher.digest().hex();
  };
  EXPECT_EQ(hash(""), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(hash("a"), "d228cb696f1a8caf78912b704e4a8964");
  EXPECT_EQ(hash("foobar"), "343e1662793c64bf6f0d3597ba446f18");
}

TEST_F(CudaCache, CompilesOnceAndKeeps) {
  EXPECT_EQ(get_anew(1), 1);
  EXPECT_EQ(get_anew(1), 0);
  EXPECT_EQ(get_anew(2), 1);
  EXPECT_EQ(files(), 2) << "entries and nothing else";
}

TEST_F(CudaCache, ACompilersVersionIsPartOfTheKey) {
  get_anew(1);
  const Cache cache(folder);
  Binary binary;
  EXPECT_FALSE(cache.load(key_of(1, 13010), binary));
  EXPECT_TRUE(cache.load(key_of(1, 13000), binary));
  EXPECT_TRUE(cache.load(key_of(1, 0), binary)) << "any compiler's";
  EXPECT_FALSE(cache.load(key_of(2, 0), binary));
}

TEST_F(CudaCache, AFailedCompilationLeavesNothing) {
  Cache cache(folder);
  Binary binary;
  const auto fails = [](Binary&) { return internal("no such instruction"); };
  EXPECT_STREQ(cache.get(key_of(1), fails, binary).message, "no such instruction");
  const auto throws = [](Binary&) -> tessera_status { throw std::runtime_error("thrown"); };
  EXPECT_PRED2(contains, cache.get(key_of(1), throws, binary).message, "thrown");
  EXPECT_EQ(get(cache, 1), 1) << "and is tried again";
}

TEST_F(CudaCache, OneThreadCompilesAndOthersWait) {
  Cache cache(folder);
  std::atomic<int> compiled{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&, number = t % 2] {
      Binary binary;
      const auto compile = [&](Binary& out) {
        ++compiled;
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        out = binary_of(number);
        return ok();
      };
      EXPECT_EQ(cache.get(key_of(number), compile, binary).code, TESSERA_OK);
      expect_same(binary, number);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(compiled, 2) << "one for each key";
}

TEST_F(CudaCache, ManyProcessesWriteTheSameEntries) {
  std::vector<pid_t> children;
  for (int c = 0; c < 8; ++c) {
    children.push_back(in_child([&] {
      for (int round = 0; round < 20; ++round) {
        Cache cache(folder);
        for (int number = 0; number < 4; ++number) {
          cache.store(key_of(number), binary_of(number));
          Binary binary;
          if (!cache.load(key_of(number), binary) || binary.cubin != binary_of(number).cubin) return false;
        }
      }
      return true;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(exit_of(child), 0) << "an entry was seen that is not whole";
  EXPECT_EQ(files(), 4) << "no temporary file is left";
}

TEST_F(CudaCache, DamagedEntriesAreReplaced) {
  get_anew(1);
  const std::string whole = content(entry(1));
  std::string flipped = whole, newer = whole;
  flipped[whole.size() / 2] ^= 1;
  newer[8] ^= 1;  // the format's version
  const std::string damages[] = {"",
                                 whole.substr(0, 7),
                                 whole.substr(0, whole.size() / 2),
                                 whole.substr(0, whole.size() - 1),
                                 whole + "x",
                                 flipped,
                                 newer,
                                 std::string(whole.size(), '\0')};
  for (const std::string& damage : damages) {
    overwrite(entry(1), damage);
    EXPECT_EQ(get_anew(1), 1) << damage.size() << " of " << whole.size() << " bytes";
    EXPECT_EQ(content(entry(1)), whole) << "replaced";
  }
  get_anew(2);
  fs::copy_file(entry(2), entry(1), fs::copy_options::overwrite_existing);
  EXPECT_EQ(get_anew(1), 1) << "another key's entry under this one's name";
}

TEST_F(CudaCache, WhatIsNoFileIsNotTrusted) {
  fs::create_directories(folder);
  get_anew(1);
  const fs::path elsewhere = root / "elsewhere";
  fs::rename(entry(1), elsewhere);
  fs::create_symlink(elsewhere, entry(1));
  EXPECT_EQ(get_anew(1), 1) << "a link";
  EXPECT_FALSE(fs::is_symlink(entry(1)));
  EXPECT_TRUE(fs::exists(elsewhere)) << "what it led to is not touched";

  fs::remove(entry(1));
  fs::create_directory(entry(1));
  EXPECT_EQ(get_anew(1), 1) << "an empty folder";
  EXPECT_EQ(get_anew(1), 0);

  fs::remove(entry(1));
  fs::create_directories(entry(1) / "inside");
  Cache cache(folder);
  EXPECT_EQ(get(cache, 1), 1) << "a folder that holds something stays, and the kernel is kept in memory";
  EXPECT_EQ(get(cache, 1), 0);
  EXPECT_TRUE(fs::exists(entry(1) / "inside"));

  ASSERT_EQ(mkfifo(entry(3).c_str(), 0600), 0);
  EXPECT_EQ(get_anew(3), 1) << "a pipe, which must not be waited for";
  EXPECT_EQ(get_anew(3), 0);
}

TEST_F(CudaCache, WithoutAFolderItWorksInMemory) {
  for (const std::string& impossible : {std::string(), std::string("/proc/nothing/here"), std::string("/dev/null/x")}) {
    Cache cache(impossible);
    EXPECT_EQ(get(cache, 1), 1) << impossible;
    EXPECT_EQ(get(cache, 1), 0) << impossible;
    EXPECT_NE(cache.unwritable(), "") << impossible;
    EXPECT_TRUE(cache.list().empty());
  }
}

TEST_F(CudaCache, AReadOnlyFolderIsStillRead) {
  get_anew(1);
  fs::permissions(folder, fs::perms::owner_read | fs::perms::owner_exec);
  const int status = exit_of(in_child([&] {
    // Root may write everywhere.
    if (geteuid() == 0) {
      fs::permissions(root, fs::perms::all);
      fs::permissions(folder.parent_path(), fs::perms::all);
      fs::permissions(folder,
                      fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
      if (setgid(65534) != 0 || setuid(65534) != 0) return false;
    }
    Cache cache(folder);
    return get(cache, 1) == 0 && get(cache, 2) == 1 && get(cache, 2) == 0 && !cache.unwritable().empty() &&
           !HasFailure();
  }));
  fs::permissions(folder, fs::perms::owner_all);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(files(), 1);
}

TEST_F(CudaCache, AFullDiskLeavesNoHalfEntry) {
  // A write beyond the limit fails as one on a full disk does, after some bytes.
  EXPECT_EQ(exit_of(in_child([&] {
              const rlimit limit{10000, 10000};
              if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
              Cache cache(folder);
              return get(cache, 1) == 1 && get(cache, 1) == 0 && !HasFailure();
            })),
            0)
      << "neither ended by SIGXFSZ nor failed";
  EXPECT_EQ(files(), 0);
  EXPECT_EQ(get_anew(1), 1);
  EXPECT_EQ(get_anew(1), 0);
}

TEST_F(CudaCache, AKilledWriterDoesNoHarm) {
  for (int round = 0; round < 20; ++round) {
    const pid_t child = in_child([&] {
      for (int i = 0;; ++i) {
        Cache cache(folder);
        cache.store(key_of(i % 3), binary_of(i % 3));
      }
      return true;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(2000 + 700 * round));
    kill(child, SIGKILL);
    EXPECT_EQ(exit_of(child), 128 + SIGKILL);
    const Cache cache(folder);
    for (const Cache::Entry& entry : cache.list()) EXPECT_TRUE(entry.intact) << entry.file;
  }
  for (int number = 0; number < 3; ++number) {
    get_anew(number);
    EXPECT_EQ(get_anew(number), 0);
  }
}

TEST_F(CudaCache, OldLeftoversAreSweptAndNewOnesStay) {
  fs::create_directories(folder);
  const fs::path old = folder / ".writing-1-2-3", fresh = folder / ".writing-4-5-6", foreign = folder / "notes.txt";
  for (const fs::path& path : {old, fresh, foreign}) overwrite(path, "half");
  const timespec day_ago{std::time(nullptr) - 24 * 3600, 0}, times[] = {day_ago, day_ago};
  ASSERT_EQ(utimensat(AT_FDCWD, old.c_str(), times, 0), 0);
  ASSERT_EQ(utimensat(AT_FDCWD, foreign.c_str(), times, 0), 0);
  get_anew(1);
  EXPECT_FALSE(fs::exists(old));
  EXPECT_TRUE(fs::exists(fresh)) << "somebody may be writing it";
  EXPECT_TRUE(fs::exists(foreign));
}

TEST_F(CudaCache, ListsAndClears) {
  get_anew(1);
  get_anew(2);
  overwrite(entry(2), "damaged");
  overwrite(folder / "notes.txt", "not ours");
  Cache cache(folder);
  auto entries = cache.list();
  ASSERT_EQ(entries.size(), 2u);
  if (!entries[0].intact) std::swap(entries[0], entries[1]);
  EXPECT_TRUE(entries[0].intact);
  EXPECT_FALSE(entries[1].intact);
  EXPECT_EQ(entries[0].binary.registers, 101);
  EXPECT_EQ(entries[0].bytes, static_cast<int64_t>(fs::file_size(entry(1))));
  EXPECT_GE(entries[0].age_seconds, 0);
  const int64_t bytes = entries[0].bytes + entries[1].bytes;
  const Cache::Cleared cleared = cache.clear();
  EXPECT_EQ(cleared.files, 2);
  EXPECT_EQ(cleared.bytes, bytes);
  EXPECT_EQ(files(), 1) << "what is not ours stays";
}

TEST(CudaCacheFolder, ComesFromTheEnvironment) {
  const auto folder_with = [](const char* own, const char* xdg, const char* home) {
    const auto set = [](const char* name, const char* value) { value ? setenv(name, value, 1) : unsetenv(name); };
    set("TESSERA_CACHE_DIR", own);
    set("XDG_CACHE_HOME", xdg);
    set("HOME", home);
    return Cache::default_folder();
  };
  EXPECT_EQ(folder_with("/own", "/xdg", "/home/me"), "/own");
  EXPECT_EQ(folder_with(nullptr, "/xdg", "/home/me"), "/xdg/tessera");
  EXPECT_EQ(folder_with("", "", "/home/me"), "/home/me/.cache/tessera");
  EXPECT_EQ(folder_with(nullptr, "relative", "/home/me"), "/home/me/.cache/tessera");
  EXPECT_EQ(folder_with(nullptr, nullptr, nullptr), "");
}

}  // namespace
}  // namespace tessera::cuda

// The disk cache of compiled kernels, with a fake compiler: many threads and processes, a crash in the middle, damaged
// entries, folders that cannot be written, a full disk.
#include "cuda/runtime/cache.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
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
      constexpr auto kForAll = static_cast<fs::perms>(0755);
      fs::permissions(root, kForAll);
      fs::permissions(folder.parent_path(), kForAll);
      fs::permissions(entry(1), static_cast<fs::perms>(0644));
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
    for (const Cache::Entry& entry : cache.list()) EXPECT_EQ(entry.fault, "") << entry.file;
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
  if (!entries[0].fault.empty()) std::swap(entries[0], entries[1]);
  EXPECT_EQ(entries[0].fault, "");
  EXPECT_EQ(entries[1].fault, "damaged");
  EXPECT_EQ(entries[0].binary.registers, 101);
  EXPECT_EQ(entries[0].bytes, static_cast<int64_t>(fs::file_size(entry(1))));
  EXPECT_GE(entries[0].age_seconds, 0);
  const int64_t bytes = entries[0].bytes + entries[1].bytes;
  const Cache::Cleared cleared = cache.clear();
  EXPECT_EQ(cleared.files, 2);
  EXPECT_EQ(cleared.bytes, bytes);
  EXPECT_EQ(files(), 1) << "what is not ours stays";
}

// ---- trusted owners of entries ----

constexpr uid_t kUser = 12345, kStranger = 23456;
constexpr gid_t kGroup = 34567, kOtherGroup = 45678;

// As root, who may give files away; in a process of its own, as another user where a test says so.
class CudaCacheTrust : public CudaCache {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "gives files to other users, which root alone may";
    CudaCache::SetUp();
    mode(root, 0755);
  }
  static void mode(const fs::path& path, mode_t bits) { ASSERT_EQ(chmod(path.c_str(), bits), 0) << path; }
  static mode_t mode_of(const fs::path& path) { return status_of(path).st_mode & 07777; }
  static struct stat status_of(const fs::path& path) {
    struct stat info {};
    EXPECT_EQ(lstat(path.c_str(), &info), 0) << path;
    return info;
  }
  static void give(const fs::path& path, uid_t user, gid_t group = 0) {
    ASSERT_EQ(lchown(path.c_str(), user, group), 0) << path;
  }
  std::string refusal() const { return Cache(folder).refusal(); }
  // For `user` and a key that is in the folder, returns 0 if the entry is loaded, 1 if the kernel is compiled.
  int got_by(uid_t user, int number) {
    const pid_t child = fork();
    if (child == 0) {
      int compiled = 2;
      if (setresgid(user, user, user) == 0 && setresuid(user, user, user) == 0) compiled = get_anew(number);
      _exit(HasFailure() ? 3 : compiled);
    }
    return exit_of(child);
  }
};

TEST_F(CudaCacheTrust, TheFolderIsTheUsersAlone) {
  const mode_t before = umask(0);
  get_anew(1);
  umask(before);
  EXPECT_EQ(mode_of(folder), 0700u);
  EXPECT_EQ(mode_of(folder.parent_path()), 0700u);
  EXPECT_EQ(mode_of(entry(1)), 0600u);
  EXPECT_EQ(refusal(), "");
}

TEST_F(CudaCacheTrust, AnEntryOfOthersIsCompiledAgainAndReplaced) {
  const auto planted = [&](const char* what, const std::function<void()>& plant, const std::string& fault) {
    get_anew(1);
    plant();
    const auto entries = Cache(folder).list();
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_PRED2(contains, entries[0].fault, fault) << what;
    EXPECT_EQ(get_anew(1), 1) << what;
    EXPECT_EQ(status_of(entry(1)).st_uid, 0u) << what;
    EXPECT_EQ(get_anew(1), 0) << what;
  };
  planted(
      "a stranger's", [&] { give(entry(1), kStranger); }, "belongs to user 23456");
  planted(
      "everybody's", [&] { mode(entry(1), 0602); }, "may be written by everybody (mode 0602)");
  planted(
      "a group's", [&] { mode(entry(1), 0620), give(entry(1), 0, kGroup); }, "may be written by group 34567");
  planted(
      "root's group", [&] { mode(entry(1), 0660); }, "may be written by group 0");
}

TEST_F(CudaCacheTrust, AFolderOfOthersIsNeitherReadNorWritten) {
  get_anew(1);
  give(folder, kStranger);
  Cache cache(folder);
  EXPECT_EQ(get(cache, 1), 1);
  EXPECT_EQ(get(cache, 2), 1);
  EXPECT_EQ(get(cache, 2), 0) << "kept in memory";
  EXPECT_EQ(files(), 1);
  EXPECT_PRED2(contains, cache.refusal(), folder.string() + " belongs to user 23456");
  EXPECT_EQ(cache.unwritable(), cache.refusal());
  EXPECT_EQ(mode_of(folder), 0700u) << "not ours to change";
}

TEST_F(CudaCacheTrust, FoldersOnTheWayAreLookedAt) {
  get_anew(1);
  const fs::path way = folder.parent_path();
  const auto refused = [&](const std::string& reason) {
    EXPECT_EQ(refusal(), way.string() + " " + reason);
    EXPECT_EQ(get_anew(1), 1);
  };
  const auto taken = [&] {
    EXPECT_EQ(refusal(), "");
    EXPECT_EQ(get_anew(1), 0);
  };
  mode(way, 0777), refused("may be written by everybody (mode 0777)");
  mode(way, 01777), taken();  // like /tmp
  give(way, 0, kGroup), mode(way, 0770), refused("may be written by group 34567 (mode 0770)");
  mode(way, 0750), taken();
  give(way, 0, 0), mode(way, 0775), taken();  // the user's own group
  give(way, kStranger), mode(way, 0755), refused("belongs to user 23456");
}

TEST_F(CudaCacheTrust, LinksOnTheWayMustBeTheUsers) {
  const fs::path real = root / "real", link = root / "below";
  fs::create_directories(real / "it");
  mode(real, 0755);
  fs::create_directory_symlink("real", link);
  EXPECT_EQ(get_anew(1), 1);
  EXPECT_EQ(get_anew(1), 0) << "a link of one's own";
  EXPECT_TRUE(fs::exists(real / "it" / entry(1).filename()));
  give(link, kStranger);
  EXPECT_EQ(get_anew(1), 1);
  EXPECT_EQ(refusal(), link.string() + " belongs to user 23456");
  fs::remove(link);
  fs::create_directory_symlink(real, link);
  EXPECT_EQ(get_anew(1), 0) << "a link with an absolute target";
  mode(real, 0777);
  EXPECT_EQ(refusal(), real.string() + " may be written by everybody (mode 0777)");
  fs::remove(link);
  fs::create_directory_symlink(link, link);
  EXPECT_PRED2(contains, refusal(), "leads nowhere");
}

TEST_F(CudaCacheTrust, AnOlderFolderOfOnesOwnIsTightened) {
  for (const mode_t bits : {0755, 0775, 0777, 0770}) {
    get_anew(1);
    get_anew(2);
    give(entry(2), kStranger);  // planted while others could write
    overwrite(folder / "notes.txt", "a stranger's");
    give(folder / "notes.txt", kStranger);
    mode(folder, bits);
    EXPECT_EQ(get_anew(1), 0);
    EXPECT_EQ(mode_of(folder), 0700u);
    EXPECT_EQ(get_anew(2), 1);
  }
}

// As a home folder, or /tmp.
TEST_F(CudaCacheTrust, AFolderOfOtherThingsKeepsItsMode) {
  get_anew(1);
  overwrite(folder / "notes.txt", "the user's");
  mode(folder, 0755);
  EXPECT_EQ(get_anew(1), 0);
  EXPECT_EQ(mode_of(folder), 0755u);
  mode(folder, 0777);
  EXPECT_EQ(get_anew(1), 1);
  EXPECT_EQ(mode_of(folder), 0777u);
  EXPECT_EQ(refusal(), folder.string() + " may be written by everybody (mode 0777)");
  fs::remove(folder / "notes.txt");
  mode(folder, 01777);
  EXPECT_EQ(get_anew(1), 1);
  EXPECT_EQ(mode_of(folder), 01777u) << "sticky: somebody's /tmp";
}

TEST_F(CudaCacheTrust, AUserTakesTheirOwnAndRootsEntries) {
  for (const int number : {1, 2, 3}) get_anew(number);
  mode(folder.parent_path(), 0755), mode(folder, 0755);
  for (const int number : {1, 2, 3}) mode(entry(number), 0644);
  give(entry(2), kUser), give(entry(3), kStranger);
  EXPECT_EQ(got_by(kUser, 1), 0) << "root's";
  EXPECT_EQ(got_by(kUser, 2), 0) << "their own";
  EXPECT_EQ(got_by(kUser, 3), 1) << "a stranger's";
  give(folder, kUser);
  EXPECT_EQ(got_by(kUser, 1), 0) << "in their own folder";
  EXPECT_EQ(mode_of(folder), 0700u);
  mode(folder, 0755);
  EXPECT_EQ(got_by(kStranger, 1), 1) << "in another's folder";
  EXPECT_EQ(get_anew(1), 1) << "root trusts no user's folder";
}

// In a user namespace that knows one user alone, the way seems to belong to the overflow user.
TEST_F(CudaCacheTrust, RootOutsideAUserNamespaceIsTrusted) {
  get_anew(1);
  give(folder, kUser, kUser), give(entry(1), kUser, kUser);
  mode(folder.parent_path(), 0755);
  const pid_t child = fork();
  if (child == 0) {
    constexpr int kNotPermitted = 77;
    if (setresgid(kUser, kUser, kUser) != 0 || setresuid(kUser, kUser, kUser) != 0) _exit(1);
    prctl(PR_SET_DUMPABLE, 1);
    if (unshare(CLONE_NEWUSER) != 0) _exit(kNotPermitted);
    std::ofstream map("/proc/self/uid_map");
    if (!(map << "12345 12345 1" << std::flush)) _exit(kNotPermitted);
    _exit(status_of("/").st_uid == 65534 ? get_anew(1) : 2);
  }
  const int status = exit_of(child);
  if (status == 77) GTEST_SKIP() << "no user namespaces here";
  EXPECT_EQ(status, 0);
}

TEST_F(CudaCacheTrust, ARelativeFolderIsRefused) {
  Cache cache("relative");
  Binary binary;
  const tessera_status status = cache.get(
      key_of(1),
      [](Binary& out) {
        out = binary_of(1);
        return ok();
      },
      binary);
  EXPECT_EQ(status.code, TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(status.message, "TESSERA_CACHE_DIR: 'relative' is relative, accepted an absolute path");
  EXPECT_EQ(cache.unwritable(), status.message);
  EXPECT_FALSE(fs::exists("relative"));
}

// A set beside a library is as trusted as the library is.
TEST_F(CudaCacheTrust, AnInstallationIsItsOwners) {
  const fs::path library = root / "libtessera.so";
  overwrite(library, "");
  folder = root / "tessera" / "aot";
  const auto open_set = [&] {
    Writers writers;
    writers.add_own_installation(library);
    return Cache(folder, writers);
  };
  open_set().store(key_of(1), binary_of(1));
  EXPECT_EQ(mode_of(folder), 0755u);
  EXPECT_EQ(mode_of(entry(1)), 0644u);
  const auto loads = [&] {
    Binary binary;
    return open_set().load(key_of(1), binary);
  };
  EXPECT_TRUE(loads());
  mode(folder, 0777);
  EXPECT_FALSE(loads()) << "everybody's folder";
  EXPECT_EQ(mode_of(folder), 0777u) << "not tightened";
  mode(folder, 0755), mode(entry(1), 0666);
  EXPECT_FALSE(loads()) << "everybody's entry";

  mode(folder, 0775), give(folder, 0, kGroup), mode(entry(1), 0664), give(entry(1), 0, kGroup);
  EXPECT_FALSE(loads()) << "a group that may not write the library";
  mode(library, 0664), give(library, 0, kGroup);
  EXPECT_TRUE(loads()) << "one that may";
  give(entry(1), 0, kOtherGroup);
  EXPECT_FALSE(loads()) << "another";
  give(entry(1), 0, kGroup), give(folder, kStranger, kGroup);
  EXPECT_FALSE(loads()) << "a user who may not write the library";
  give(library, kStranger, kGroup);
  EXPECT_TRUE(loads()) << "one who may";

  give(folder.parent_path(), kUser);
  EXPECT_FALSE(loads()) << "a folder between";
  give(folder.parent_path(), 0), give(root, 0, kOtherGroup), mode(root, 0775);
  EXPECT_TRUE(loads()) << "whoever may exchange the library";
  give(entry(1), 0, kOtherGroup);
  EXPECT_TRUE(loads()) << "whoever may exchange the library";
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
  EXPECT_EQ(folder_with("relative", "/xdg", "/home/me"), "relative") << "which the cache refuses";
}

}  // namespace
}  // namespace tessera::cuda

#include "confine.h"

#include <cerrno>
#include <cstddef>
#include <cstdint>

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// Kernel headers of boards may be older than these.
#ifndef __NR_statx
#define __NR_statx (-1)
#endif
#ifndef __NR_rseq
#define __NR_rseq (-1)
#endif
#ifndef __NR_faccessat2
#define __NR_faccessat2 (-1)
#endif
#ifndef __NR_close_range
#define __NR_close_range (-1)
#endif
#ifndef SECCOMP_FILTER_FLAG_TSYNC
#define SECCOMP_FILTER_FLAG_TSYNC 1
#endif
#ifndef SECCOMP_FILTER_FLAG_SPEC_ALLOW
#define SECCOMP_FILTER_FLAG_SPEC_ALLOW 4
#endif

namespace etfarm {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#else
constexpr std::uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#endif

// The calls that the runner, the C library, ExecuTorch and XNNPACK make once everything is loaded. All others answer ENOSYS,
// for which libraries have a fallback where possible.
constexpr long kAllowed[] = {
    __NR_read, __NR_write, __NR_readv, __NR_writev, __NR_pread64, __NR_pwrite64, __NR_lseek, __NR_openat, __NR_close,
    __NR_close_range, __NR_fstat, __NR_newfstatat, __NR_statx, __NR_statfs, __NR_fstatfs, __NR_faccessat, __NR_faccessat2, __NR_readlinkat,
    __NR_getdents64, __NR_getcwd, __NR_ftruncate, __NR_fallocate, __NR_fsync, __NR_fdatasync, __NR_fadvise64, __NR_unlinkat,
    __NR_dup, __NR_dup3, __NR_ppoll,
    __NR_mmap, __NR_munmap, __NR_mprotect, __NR_mremap, __NR_madvise, __NR_msync, __NR_mincore, __NR_brk, __NR_mlock, __NR_munlock,
    __NR_futex, __NR_set_robust_list, __NR_get_robust_list, __NR_rseq, __NR_set_tid_address, __NR_membarrier,
    __NR_sched_yield, __NR_sched_getaffinity, __NR_sched_setaffinity, __NR_sched_getparam, __NR_sched_getscheduler,
    __NR_sched_get_priority_max, __NR_sched_get_priority_min, __NR_getcpu,
    __NR_getrusage, __NR_times, __NR_clock_gettime, __NR_clock_getres, __NR_clock_nanosleep, __NR_nanosleep, __NR_gettimeofday,
    __NR_exit, __NR_exit_group, __NR_restart_syscall, __NR_gettid, __NR_getpid, __NR_getppid, __NR_getuid, __NR_geteuid, __NR_getgid,
    __NR_getegid, __NR_uname, __NR_sysinfo, __NR_getrandom,
    __NR_rt_sigaction, __NR_rt_sigprocmask, __NR_rt_sigreturn, __NR_sigaltstack,
#if defined(__x86_64__)
    __NR_open, __NR_stat, __NR_lstat, __NR_access, __NR_readlink, __NR_unlink, __NR_dup2, __NR_poll, __NR_time, __NR_arch_prctl,
    __NR_getrlimit,
#endif
};  // clang-format off

using Filter = std::vector<sock_filter>;

constexpr std::uint32_t kArgument0 = offsetof(seccomp_data, args);
constexpr std::uint32_t kArgument1 = offsetof(seccomp_data, args) + sizeof(std::uint64_t);

sock_filter load(std::uint32_t offset) { return BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset); }
sock_filter give(std::uint32_t action) { return BPF_STMT(BPF_RET | BPF_K, action); }
sock_filter equals(std::uint32_t value, std::uint8_t then, std::uint8_t otherwise) {
  return BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, then, otherwise);
}

// Allows a call if the word at `argument` is one of `values`.
void allow_with(Filter& filter, long number, std::uint32_t argument, const std::vector<std::uint32_t>& values) {
  const auto count = static_cast<std::uint8_t>(values.size());
  filter.push_back(equals(static_cast<std::uint32_t>(number), 0, static_cast<std::uint8_t>(count + 3)));
  filter.push_back(load(argument));
  for (std::uint8_t i = 0; i < count; ++i) filter.push_back(equals(values[i], static_cast<std::uint8_t>(count - i), 0));
  filter.push_back(give(SECCOMP_RET_ERRNO | EPERM));
  filter.push_back(give(SECCOMP_RET_ALLOW));
}

bool filter_calls() {
  const auto self = static_cast<std::uint32_t>(::getpid());
  Filter filter{
      load(offsetof(seccomp_data, arch)), equals(kArchitecture, 1, 0), give(SECCOMP_RET_KILL), load(offsetof(seccomp_data, nr)),
  };
  for (const long number : kAllowed) {
    if (number < 0) continue;
    filter.push_back(equals(static_cast<std::uint32_t>(number), 0, 1));
    filter.push_back(give(SECCOMP_RET_ALLOW));
  }
  // Allow threads, but no processes. Filters cannot read the flags of clone3; without it the C library falls back to clone.
  filter.push_back(equals(__NR_clone, 0, 4));
  filter.push_back(load(kArgument0));
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 1, 0));
  filter.push_back(give(SECCOMP_RET_ERRNO | EPERM));
  filter.push_back(give(SECCOMP_RET_ALLOW));
  allow_with(filter, __NR_tgkill, kArgument0, {self});
  allow_with(filter, __NR_prlimit64, kArgument0, {0, self});
  allow_with(filter, __NR_prctl, kArgument0, {PR_SET_NAME, PR_GET_NAME, PR_GET_DUMPABLE, 0x53564d41 /* PR_SET_VMA */,
                                              50, 51, 63, 64 /* vector lengths of SVE and SME */});
  allow_with(filter, __NR_fcntl, kArgument1, {F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC});
  allow_with(filter, __NR_ioctl, kArgument1, {0x5401 /* TCGETS: is it a terminal? */, FIONREAD});
  filter.push_back(give(SECCOMP_RET_ERRNO | ENOSYS));
  sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  // Without SPEC_ALLOW, kernels before 5.16 would slow down the measured program.
  for (const unsigned flags : {SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_SPEC_ALLOW, SECCOMP_FILTER_FLAG_TSYNC}) {
    if (::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) == 0) return true;
  }
  return ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Landlock. Source: include/uapi/linux/landlock.h, which build machines may lack; its numbers are equal on all architectures.
constexpr long kCreateRuleset = 444, kAddRule = 445, kRestrictSelf = 446;
constexpr std::uint64_t kExecute = 1, kWrite = 2, kRead = 4, kReadFolder = 8, kRemove = 1 << 5, kMake = 1 << 8, kTruncate = 1 << 14;
constexpr std::uint64_t kFileRights = kExecute | kWrite | kRead | kTruncate;

struct Ruleset {
  std::uint64_t files, network, scopes;
};

struct [[gnu::packed]] PathBeneath {
  std::uint64_t rights;
  std::int32_t descriptor;
};

void allow_path(int ruleset, std::uint64_t known, const std::string& path, std::uint64_t rights) {
  const int descriptor = ::open(path.c_str(), O_PATH | O_CLOEXEC);
  if (descriptor < 0) return;
  struct stat status {};
  const bool is_folder = ::fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode);
  PathBeneath rule{rights & known & (is_folder ? ~std::uint64_t{0} : kFileRights), descriptor};
  ::syscall(kAddRule, ruleset, 1, &rule, 0);
  // An open entry of /proc keeps its inode, to which the rule applies.
  if (path.rfind("/proc/", 0) != 0) ::close(descriptor);
}

bool restrict_files(const std::vector<std::string>& readable) {
  const long version = ::syscall(kCreateRuleset, nullptr, 0, 1);
  if (version < 1) return false;
  const int rights = version >= 5 ? 16 : version >= 3 ? 15 : version >= 2 ? 14 : 13;
  const std::uint64_t known = (std::uint64_t{1} << rights) - 1;
  const Ruleset attributes{known, 3, 3};
  const std::size_t size = version >= 6 ? 24 : version >= 4 ? 16 : 8;
  const int ruleset = static_cast<int>(::syscall(kCreateRuleset, &attributes, size, 0));
  if (ruleset < 0) return false;
  allow_path(ruleset, known, ".", kRead | kReadFolder | kWrite | kRemove | kMake | kTruncate);
  allow_path(ruleset, known, "/dev/null", kRead | kWrite);
  for (const char* path : {"/dev/urandom", "/proc/self", "/proc/cpuinfo", "/proc/stat", "/proc/meminfo", "/proc/pressure", "/proc/sys/vm",
                           "/sys/devices/system", "/sys/devices/soc0"}) {
    allow_path(ruleset, known, path, kRead | kReadFolder);
  }
  for (const auto& path : readable) allow_path(ruleset, known, path, kRead | kReadFolder);
  const bool done = ::syscall(kRestrictSelf, ruleset, 0) == 0;
  ::close(ruleset);
  return done;
}

}  // namespace

std::vector<std::string> confine(const std::vector<std::string>& readable) {
  std::vector<std::string> active;
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0) active.push_back("no-new-privileges");
  if (restrict_files(readable)) active.push_back("landlock");
  if (filter_calls()) active.push_back("seccomp");
  return active;
}

}  // namespace etfarm

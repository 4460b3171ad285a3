// A program that turns against the device it runs on, for tests: x + y of float32, and at its first execution every attack that a
// process can try, each with one line on stderr: "probe NAME: refused ERRNO" or "probe NAME: REACHED". Signals are of number 0: they
// ask whether another would arrive. Linked as faults.cpp. The first value of x is the port of a listener.
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <netinet/in.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <executorch/runtime/kernel/operator_registry.h>

namespace {

using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

void tell(const char* name, bool reached) {
  const int error = errno;
  if (reached) std::fprintf(stderr, "probe %s: REACHED\n", name);
  else std::fprintf(stderr, "probe %s: refused %s\n", name, std::strerror(error));
}

void must(const char* name, bool works) { std::fprintf(stderr, "need %s: %s\n", name, works ? "works" : std::strerror(errno)); }

bool reads(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
  if (file < 0) return false;
  char byte;
  const bool got = ::read(file, &byte, 1) >= 0;
  ::close(file);
  return got;
}

bool lists(const std::string& path) {
  DIR* folder = ::opendir(path.c_str());
  if (!folder) return false;
  ::closedir(folder);
  return true;
}

// Makes, or opens for writing, and leaves no trace where that works.
bool writes(const std::string& path, bool make) {
  const int file = ::open(path.c_str(), make ? O_WRONLY | O_CREAT | O_EXCL : O_WRONLY, 0600);
  if (file < 0) return false;
  ::close(file);
  if (make) ::unlink(path.c_str());
  return true;
}

bool connects_inet(int port) {
  const int made = ::socket(AF_INET, SOCK_STREAM, 0);
  if (made < 0) return false;
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool done = ::connect(made, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  ::close(made);
  return done;
}

bool has_socket(int family, int kind) {
  const int made = ::socket(family, kind, 0);
  if (made >= 0) ::close(made);
  return made >= 0;
}

bool forks() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::setsid();
    ::alarm(60);
    ::pause();
    ::_exit(0);
  }
  return child > 0;
}

bool spawns() {
  pid_t child = 0;
  char name[] = "true";
  char* const arguments[] = {name, nullptr};
  const int error = ::posix_spawn(&child, "/bin/true", nullptr, nullptr, arguments, nullptr);
  errno = error;
  return error == 0;
}

bool has_capabilities() {
  __user_cap_header_struct head{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2]{};
  if (::syscall(SYS_capget, &head, data) != 0) return true;
  errno = EPERM;
  return (data[0].effective | data[1].effective | data[0].permitted | data[1].permitted) != 0;
}

void attack(int port) {
  const pid_t agent = ::getppid();
  const std::string of_agent = "/proc/" + std::to_string(agent);
  char here[4096];
  if (!::getcwd(here, sizeof here)) std::strcpy(here, "/");
  // .../agent-0/runs/HASH/0
  const std::string own = here, data = own.substr(0, own.find("/runs/")), farm = data.substr(0, data.rfind('/'));

  must("own file", writes(own + "/mine", true) || writes("mine", true));
  must("status", reads("/proc/self/status"));
  must("cpu statistics", reads("/proc/stat"));
  must("tasks", lists("/proc/self/task"));
  must("cpuinfo", reads("/proc/cpuinfo"));
  must("cpu topology", lists("/sys/devices/system/cpu"));
  must("null", writes("/dev/null", false));
  if (::access("/proc/pressure/cpu", F_OK) == 0) must("pressure", reads("/proc/pressure/cpu"));
  cpu_set_t cpus;
  must("affinity", ::sched_getaffinity(0, sizeof cpus, &cpus) == 0 && ::sched_setaffinity(0, sizeof cpus, &cpus) == 0);
  bool ran = false;
  std::thread([&ran] { ran = true; }).join();
  must("thread", ran);
  must("own signal", ::syscall(SYS_tgkill, ::getpid(), ::syscall(SYS_gettid), 0) == 0);

  tell("environ", reads(of_agent + "/environ"));
  tell("memory", reads(of_agent + "/mem") || ::open((of_agent + "/mem").c_str(), O_RDWR) >= 0);
  tell("maps", reads(of_agent + "/maps"));
  tell("descriptors", lists(of_agent + "/fd"));
  tell("command line", reads(of_agent + "/cmdline"));
  tell("working folder", lists(of_agent + "/cwd"));
  tell("root", lists(of_agent + "/root/etc"));
  tell("ptrace", ::ptrace(PTRACE_SEIZE, agent, nullptr, nullptr) == 0);
  char word[8];
  iovec mine{word, sizeof word}, theirs{reinterpret_cast<void*>(0x10000), sizeof word};
  errno = 0;
  // EFAULT is an answer of the agent's memory.
  tell("process_vm_readv", ::process_vm_readv(agent, &mine, 1, &theirs, 1, 0) >= 0 || errno == EFAULT);
  tell("processes", lists("/proc"));

  tell("token file", reads(farm + "/token"));
  tell("world-readable file", reads(farm + "/open/readme"));
  tell("world-writable folder", writes(farm + "/open/made", true));
  tell("agent id", reads(data + "/agent_id"));
  tell("data folder", lists(data) || lists("../../.."));
  tell("cache", lists(data + "/cache/blobs") || lists("../../../cache/blobs"));
  tell("cache write", writes(data + "/cache/blobs/made", true) || writes("../../../cache/blobs/made", true));
  tell("other attempts", lists(data + "/runs") || lists("../..") || lists(".."));
  tell("passwd", writes("/etc/passwd", false));
  tell("accounts", reads("/etc/passwd"));
  tell("tmp", writes("/tmp/etfarm-hostile-made", true));
  tell("var tmp", writes("/var/tmp/etfarm-hostile-made", true));
  tell("shared memory", writes("/dev/shm/etfarm-hostile-made", true));

  // The bundle and the program, which others will use too.
  const std::string program = program_invocation_name, name = program.substr(0, program.rfind('/'));
  must("own bundle", reads(name + "/etfarm-runner"));
  tell("program write", writes(name + "/file-0", false));
  tell("program delete", ::unlink((name + "/file-0").c_str()) == 0);
  tell("program mode", ::chmod((name + "/file-0").c_str(), 0666) == 0);
  tell("bundle addition", writes(name + "/made", true));
  tell("bundle write", writes(name + "/etfarm-runner", false));
  tell("bundle move", ::rename(name.c_str(), "moved") == 0);
  tell("link", ::link("/etc/passwd", "linked") == 0);
  tell("symlink", ::symlink("/etc/shadow", "linked") == 0);
  tell("folder", ::mkdir("deep", 0700) == 0);
  tell("fifo", ::mkfifo("fifo", 0600) == 0);

  tell("inet", connects_inet(port));
  tell("udp", has_socket(AF_INET, SOCK_DGRAM));
  tell("unix", has_socket(AF_UNIX, SOCK_STREAM));
  tell("netlink", has_socket(AF_NETLINK, SOCK_RAW));
  int pair[2];
  tell("socketpair", ::socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  char parameters[120]{};
  tell("io_uring", ::syscall(SYS_io_uring_setup, 4, parameters) >= 0);

  tell("capabilities", has_capabilities());
  tell("setuid", ::setuid(0) == 0 && ::getuid() == 0);
  tell("user namespace", ::unshare(CLONE_NEWUSER) == 0);
  // A file system that there is none of is missed by those alone who may mount.
  tell("mount", ::mount("none", ".", "no-such-type", 0, nullptr) == 0 || errno == ENODEV);
  tell("chroot", ::chroot(".") == 0);

  tell("limits of the agent", ::prlimit(agent, RLIMIT_CPU, nullptr, nullptr) == 0);
  tell("priority of the agent", ::setpriority(PRIO_PROCESS, static_cast<id_t>(agent), 0) == 0);
  tell("outliving the agent", ::prctl(PR_SET_PDEATHSIG, 0) == 0);
  tell("fork", forks());
  tell("spawn", spawns());
  tell("signal of the agent", ::kill(agent, 0) == 0);
  tell("signal to all", ::kill(-1, 0) == 0);
  char shell[] = "sh";
  char* const arguments[] = {shell, nullptr};
  ::execve("/bin/sh", arguments, arguments + 1);
  tell("exec", false);
  std::fprintf(stderr, "probes are over\n");
}

void pry(KernelRuntimeContext&, Span<EValue*> stack) {
  const auto& x = stack[0]->toTensor();
  const auto& y = stack[1]->toTensor();
  auto& out = stack[3]->toTensor();
  static bool done = false;
  if (!done) attack(static_cast<int>(x.const_data_ptr<float>()[0]));
  done = true;
  for (ssize_t i = 0; i < out.numel(); ++i) {
    out.mutable_data_ptr<float>()[i] = x.const_data_ptr<float>()[i] + y.const_data_ptr<float>()[i];
  }
}

// As a program that hides what it left: a descendant in a session of its own, then an endless loop.
void hide(KernelRuntimeContext&, Span<EValue*>) {
  tell("daemon", forks());
  for (volatile int i = 0;; i = i + 1) {
  }
}

const Kernel kernels[] = {Kernel("evil::pry.out", pry), Kernel("evil::hid.out", hide)};
const auto registered = executorch::runtime::register_kernels({kernels, sizeof kernels / sizeof *kernels});

}  // namespace

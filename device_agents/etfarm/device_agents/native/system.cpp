#include "system.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <fstream>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>

#include "session.h"

namespace etfarm {
namespace {

std::optional<std::int64_t> cpu_pressure_us() {
  std::ifstream file("/proc/pressure/cpu");
  std::string word;
  bool some = false;
  while (file >> word) {
    if (word == "some") some = true;
    if (some && word.compare(0, 6, "total=") == 0) return std::strtoll(word.c_str() + 6, nullptr, 10);
  }
  return std::nullopt;
}

}  // namespace

Usage Usage::now() {
  Usage usage{};
  usage.pressure_us = cpu_pressure_us();
  rusage own{};
  if (::getrusage(RUSAGE_SELF, &own) == 0) {
    usage.voluntary_switches = own.ru_nvcsw;
    usage.involuntary_switches = own.ru_nivcsw;
    usage.minor_faults = own.ru_minflt;
    usage.major_faults = own.ru_majflt;
  }
  timespec cpu{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu) == 0) usage.cpu_ns = cpu.tv_sec * 1'000'000'000LL + cpu.tv_nsec;
  usage.wall_ns = now_ns();
  return usage;
}

std::optional<std::int64_t> status_bytes(const std::string& key) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size() + 1, key + ":") == 0) return std::strtoll(line.c_str() + key.size() + 1, nullptr, 10) * 1024;
  }
  return std::nullopt;
}

std::optional<std::int64_t> peak_rss_bytes(std::int64_t ours) {
  static std::int64_t raised = 0;
  static std::int64_t without_ours = 0;
  const auto peak = status_bytes("VmHWM");
  if (!peak) return std::nullopt;
  if (*peak > raised) {
    without_ours = std::max(without_ours, *peak - ours);
    raised = *peak;
  }
  return without_ours;
}

std::optional<std::string> bind_to_cores(const std::vector<std::int64_t>& cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const auto core : cores) CPU_SET(static_cast<std::size_t>(core), &set);
  // New threads inherit the affinity; existing threads need it set one by one.
  DIR* tasks = ::opendir("/proc/self/task");
  if (!tasks) return ::sched_setaffinity(0, sizeof(set), &set) == 0 ? std::nullopt : std::optional<std::string>(std::strerror(errno));
  std::optional<std::string> problem;
  while (const dirent* task = ::readdir(tasks)) {
    const int id = std::atoi(task->d_name);
    if (id > 0 && ::sched_setaffinity(id, sizeof(set), &set) != 0 && errno != ESRCH) problem = std::strerror(errno);
  }
  ::closedir(tasks);
  return problem;
}

std::optional<std::int64_t> task_count() {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, 8, "Threads:") == 0) return std::strtoll(line.c_str() + 8, nullptr, 10);
  }
  return std::nullopt;
}

void restrain(std::optional<std::int64_t> data_bytes) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const rlimit none{0, 0};
  ::setrlimit(RLIMIT_CORE, &none);
  if (data_bytes) {
    const rlimit data{static_cast<rlim_t>(*data_bytes), static_cast<rlim_t>(*data_bytes)};
    if (::setrlimit(RLIMIT_DATA, &data) != 0) {
      std::fprintf(stderr, "etfarm-runner: cannot limit memory: %s\n", std::strerror(errno));
      std::_Exit(2);
    }
  }
}

}  // namespace etfarm

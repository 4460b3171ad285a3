// Linux' counters of this process. A value that the kernel does not provide is absent, never 0.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace etfarm {

// Counters at one moment; the difference of two covers the time in between.
struct Usage {
  std::int64_t wall_ns;
  std::optional<std::int64_t> cpu_ns;
  std::optional<std::int64_t> voluntary_switches;
  std::optional<std::int64_t> involuntary_switches;
  std::optional<std::int64_t> minor_faults;
  std::optional<std::int64_t> major_faults;
  std::optional<std::int64_t> pressure_us;  // PSI cpu, `some`: time in which a task on the machine waited for a CPU

  static Usage now();
};

// A `Key:  N kB` line of /proc/self/status, in bytes.
std::optional<std::int64_t> status_bytes(const std::string& key);

// Peak resident memory of this process (VmHWM), less the measurement's own share at that time.
// `ours`: bytes of samples that are resident now, or were since the last call.
std::optional<std::int64_t> peak_rss_bytes(std::int64_t ours = 0);

// Binds every thread of the process to these CPUs. Returns an errno text if that fails.
std::optional<std::string> bind_to_cores(const std::vector<std::int64_t>& cores);

// Number of threads of the process.
std::optional<std::int64_t> task_count();

// Ends this process with its parent, forbids core dumps, and limits its data segment if `data_bytes` is set.
void restrain(std::optional<std::int64_t> data_bytes);

}  // namespace etfarm

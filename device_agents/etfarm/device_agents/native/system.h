// What Linux tells about this process. Every value is absent where the kernel does not give it, never 0 instead.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace etfarm {

// Counters at one moment; the difference of two tells what happened between.
struct Usage {
  std::int64_t wall_ns;
  std::optional<std::int64_t> cpu_ns;
  std::optional<std::int64_t> voluntary_switches;
  std::optional<std::int64_t> involuntary_switches;
  std::optional<std::int64_t> minor_faults;
  std::optional<std::int64_t> major_faults;
  std::optional<std::int64_t> pressure_us;  // PSI cpu, `some`: time in which somebody on the machine waited for a CPU

  static Usage now();
};

// A `Key:  N kB` line of /proc/self/status, in bytes.
std::optional<std::int64_t> status_bytes(const std::string& key);

// The most memory that this process had resident (VmHWM), less what was the measurement's own when that rose.
// `ours`: bytes of samples that are resident now, or were since the last call.
std::optional<std::int64_t> peak_rss_bytes(std::int64_t ours = 0);

// Binds every thread of the process to these CPUs. An errno text where that fails.
std::optional<std::string> bind_to_cores(const std::vector<std::int64_t>& cores);

// Threads that the process has.
std::optional<std::int64_t> task_count();

// Ends this process when its parent ends, forbids core dumps, and limits its data segment where `data_bytes` is given.
void restrain(std::optional<std::int64_t> data_bytes);

}  // namespace etfarm

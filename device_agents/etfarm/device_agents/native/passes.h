// The passes over a loaded method: timed, traced, and with intermediate outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "session.h"
#include "system.h"

namespace etfarm {

constexpr std::int64_t kProgressNs = 250'000'000;  // minimum time between two progress events of a stage

// Sends a `progress` event.
void report_progress(const char* stage, std::int64_t done, std::int64_t elapsed_ns);

// Adds the counters between two readings.
void add_counters(Json& result, const Usage& before, const Usage& after);

struct Plan {
  std::int64_t warmup;
  bool steady;  // whether the warm-up goes on until the median is steady
  std::int64_t max_warmup_ns;
  std::int64_t iterations;
  std::int64_t min_time_ns;
  std::int64_t max_time_ns;
  std::int64_t max_samples;
};

// Runs untraced iterations with one pair of clock stamps each, and sends the `result` event with the samples as its payload.
void measure(Session& session, const Plan& plan, Json result);

// Runs `iterations` traced iterations after `warmup` unrecorded ones, and writes the ETDump to `path`.
void trace(Session& session, std::int64_t warmup, std::int64_t iterations, const std::string& path, Json result);

// Runs one iteration with every intermediate output: ETDump to `path`, tensors to `dump`, which has at most `max_bytes`.
Json debug(Session& session, const std::string& path, const std::string& dump, std::size_t max_bytes, Json result);

}  // namespace etfarm

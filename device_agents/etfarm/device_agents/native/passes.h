// The passes over a loaded method: timed, traced, and with intermediate outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "session.h"

namespace etfarm {

struct Plan {
  std::int64_t warmup;
  bool steady;  // whether the warm-up goes on until the median is steady
  std::int64_t max_warmup_ns;
  std::int64_t iterations;
  std::int64_t min_time_ns;
  std::int64_t max_time_ns;
  std::int64_t max_samples;
};

// Untraced iterations, one pair of clock stamps each. Sends the `result` event itself, with the samples as its payload.
void measure(Session& session, const Plan& plan, Json result);

// `iterations` traced ones after `warmup` that leave no trace, written to `path` as ETDump.
void trace(Session& session, std::int64_t warmup, std::int64_t iterations, const std::string& path, Json result);

// One iteration with every intermediate output: ETDump to `path`, the tensors to `dump`, which gets no larger than `max_bytes`.
Json debug(Session& session, const std::string& path, const std::string& dump, std::size_t max_bytes, Json result);

}  // namespace etfarm

#include "passes.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <executorch/devtools/etdump/data_sinks/file_data_sink.h>

#include "system.h"

namespace etfarm {
namespace {

constexpr std::int64_t kProgressNs = 250'000'000;

void report(const char* stage, std::int64_t done, std::int64_t elapsed_ns) {
  Channel::get().send(Json().text("event", "progress").text("stage", stage).number("done", done).number("elapsed_ns", elapsed_ns));
}

std::optional<std::int64_t> difference(const std::optional<std::int64_t>& after, const std::optional<std::int64_t>& before) {
  if (!after || !before) return std::nullopt;
  return *after - *before;
}

// Samples go to the wire as int64 little-endian, which is what every target of ours stores.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

std::size_t write_etdump(executorch::etdump::ETDumpGen& tracer, const std::string& path) {
  const auto dump = tracer.get_etdump_data();
  const std::unique_ptr<void, decltype(&std::free)> owned(dump.buf, std::free);
  if (!dump.buf || dump.size == 0) throw Failure{"RUNTIME", "the tracer gave no ETDump", "", {}};
  std::FILE* file = std::fopen(path.c_str(), "wb");
  bool written = file && std::fwrite(dump.buf, 1, dump.size, file) == dump.size;
  written = (file && std::fclose(file) == 0) && written;
  if (!written) throw Failure{"FILE", "cannot write " + path + ": " + std::strerror(errno), "", {}};
  tracer.reset();
  return dump.size;
}

}  // namespace

void measure(Session& session, const Plan& plan, Json result) {
  LoadedMethod& method = session.ready();
  if (method.tracer()) throw Failure{"BAD_STATE", "the method is loaded with a tracer, which costs time; load it without", "", {}};
  const auto& inputs = session.inputs();
  // Pages are touched by the samples that come: reserving a million of them adds nothing to the peak RSS.
  const Pages buffer(static_cast<std::size_t>(plan.max_samples) * sizeof(std::int64_t), Pages::For::Us);
  auto* samples = reinterpret_cast<std::int64_t*>(buffer.data());

  report("WARMUP", 0, 0);
  std::int64_t warmup = 0;
  const std::int64_t warming = now_ns();
  for (std::int64_t told = 0; warmup < plan.warmup;) {
    const std::int64_t spent = method.execute(inputs).end - warming;
    ++warmup;
    if (spent >= plan.max_time_ns) break;  // a program that is this slow is warm
    if (spent - told >= kProgressNs) {
      report("WARMUP", warmup, spent);
      told = spent;
    }
  }

  report("TIMED", 0, 0);
  std::int64_t count = 0;
  std::int64_t elapsed = 0;
  const char* stop_reason = nullptr;
  const Usage before = Usage::now();
  const std::int64_t start = now_ns();
  for (std::int64_t told = 0; !stop_reason;) {
    const Span span = method.execute(inputs);
    samples[count++] = span.ns();
    elapsed = span.end - start;
    if (count >= plan.iterations && elapsed >= plan.min_time_ns) {
      stop_reason = "ENOUGH";
    } else if (count >= plan.max_samples) {
      stop_reason = "MAX_SAMPLES";
    } else if (elapsed >= plan.max_time_ns) {
      stop_reason = "MAX_TIME";
    } else if (elapsed - told >= kProgressNs) {
      report("TIMED", count, elapsed);
      told = elapsed;
    }
  }
  const Usage after = Usage::now();
  const auto peak = status_bytes("VmHWM");

  result.number("warmup", warmup)
      .number("first_run_ns", method.first_run_ns)
      .number("iterations", count)
      .number("duration_ns", elapsed)
      .text("stop_reason", stop_reason)
      .number("wall_ns", after.wall_ns - before.wall_ns)
      .number("cpu_ns", difference(after.cpu_ns, before.cpu_ns))
      .number("voluntary_switches", difference(after.voluntary_switches, before.voluntary_switches))
      .number("involuntary_switches", difference(after.involuntary_switches, before.involuntary_switches))
      .number("minor_faults", difference(after.minor_faults, before.minor_faults))
      .number("major_faults", difference(after.major_faults, before.major_faults))
      .number("cpu_pressure_us", difference(after.pressure_us, before.pressure_us))
      .number("peak_rss_bytes", peak)
      .number("payload_bytes", count * static_cast<std::int64_t>(sizeof(std::int64_t)));
  Channel::get().send(result, samples, static_cast<std::size_t>(count) * sizeof(std::int64_t));
}

void trace(Session& session, std::int64_t warmup, std::int64_t iterations, const std::string& path, Json result) {
  LoadedMethod& method = session.ready();
  if (!method.tracer() || method.debugging()) throw Failure{"BAD_STATE", "trace needs the method loaded with trace=1 debug=0", "", {}};
  const auto& inputs = session.inputs();
  report("TRACED", 0, 0);
  for (std::int64_t i = 0; i < warmup; ++i) method.execute(inputs);
  if (warmup > 0) method.tracer()->reset();  // cold iterations would spoil the means of the profile

  std::vector<std::int64_t> samples;
  samples.reserve(static_cast<std::size_t>(iterations));
  const std::int64_t start = now_ns();
  for (std::int64_t i = 0, told = start; i < iterations; ++i) {
    const Span span = method.execute(inputs);
    samples.push_back(span.ns());
    if (span.end - told >= kProgressNs) {
      report("TRACED", i + 1, span.end - start);
      told = span.end;
    }
  }
  const std::size_t size = write_etdump(*method.tracer(), path);
  const std::size_t bytes = samples.size() * sizeof(std::int64_t);
  result.number("iterations", iterations)
      .number("etdump_bytes", static_cast<std::int64_t>(size))
      .number("payload_bytes", static_cast<std::int64_t>(bytes));
  Channel::get().send(result, samples.data(), bytes);
}

Json debug(Session& session, const std::string& path, const std::string& dump, Json result) {
  LoadedMethod& method = session.ready();
  if (!method.debugging()) throw Failure{"BAD_STATE", "debug needs the method loaded with trace=1 debug=1", "", {}};
  report("DEBUG", 0, 0);
  auto created = executorch::etdump::FileDataSink::create(dump.c_str());
  if (!created.ok()) throw runtime_failure("cannot write " + dump, created.error());
  executorch::etdump::FileDataSink sink = std::move(*created);
  method.tracer()->set_data_sink(&sink);
  std::int64_t took = 0;
  try {
    took = method.execute(session.inputs()).ns();
  } catch (...) {
    method.tracer()->set_data_sink(nullptr);
    throw;
  }
  const std::size_t size = write_etdump(*method.tracer(), path);
  method.tracer()->set_data_sink(nullptr);
  const auto dumped = static_cast<std::int64_t>(sink.get_used_bytes());
  sink.close();
  return result.number("run_ns", took).number("etdump_bytes", static_cast<std::int64_t>(size)).number("dump_bytes", dumped);
}

}  // namespace etfarm

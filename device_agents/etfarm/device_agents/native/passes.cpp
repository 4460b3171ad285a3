#include "passes.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>

#include <executorch/devtools/etdump/data_sinks/data_sink_base.h>

#include "system.h"

namespace etfarm {
namespace {

// A warm-up is steady once the medians of the latest windows lie within 2 %, or, for programs of a few microseconds, within
// the resolution of phones' counters (52 ns at 19.2 MHz). All windows are compared with each other: a drift of 2 % per window
// is not steady. A window lasts long enough for a governor to react.
constexpr std::size_t kWindows = 3;
constexpr std::int64_t kWindowIterations = 5;
constexpr std::int64_t kWindowNs = 50'000'000;
constexpr std::int64_t kWindowSamples = 1 << 16;
constexpr std::int64_t kSteadyShare = 50;
constexpr std::int64_t kSteadyNs = 104;

std::optional<std::int64_t> difference(const std::optional<std::int64_t>& after, const std::optional<std::int64_t>& before) {
  if (!after || !before) return std::nullopt;
  return *after - *before;
}

// Samples are sent as int64 little-endian, which is the native format of every supported target.
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

// Intermediate outputs in a file. Write errors are reported at the end, since ETDump aborts if a write fails, and ExecuTorch's
// own file sink ignores errors on closing.
class DumpFile final : public executorch::etdump::DataSinkBase {
 public:
  DumpFile(const std::string& path, std::size_t max_bytes)
      : path_(path), max_bytes_(max_bytes), file_(std::fopen(path.c_str(), "wb")) {
    if (!file_) throw failure(errno);
  }
  DumpFile(const DumpFile&) = delete;
  DumpFile& operator=(const DumpFile&) = delete;
  ~DumpFile() override {
    if (file_) std::fclose(file_);
  }

  executorch::runtime::Result<std::size_t> write(const void* data, std::size_t size) override {
    const std::size_t offset = used_;
    used_ += size;
    if (!error_ && size > 0 && used_ <= max_bytes_ && std::fwrite(data, 1, size, file_) != size) error_ = errno;
    return offset;
  }
  std::size_t get_used_bytes() const override { return used_; }

  void close() {
    if (std::fclose(std::exchange(file_, nullptr)) != 0 && !error_) error_ = errno;
    if (error_) throw failure(error_);
    if (used_ > max_bytes_) {
      const std::string most = std::to_string(max_bytes_);
      throw Failure{"FILE", "the intermediate outputs take " + std::to_string(used_) + " bytes, and there is room for " + most, "", {}};
    }
  }

 private:
  Failure failure(int error) const { return Failure{"FILE", "cannot write " + path_ + ": " + std::strerror(error), "", {}}; }

  std::string path_;
  std::size_t max_bytes_;
  std::FILE* file_;
  std::size_t used_ = 0;
  int error_ = 0;
};

struct WarmUp {
  std::int64_t iterations;
  std::int64_t elapsed_ns;
  std::int64_t samples;  // maximum number that one window recorded
  std::optional<bool> steady;  // absent if it was not requested
};

// The untimed iterations before a measurement. `window` has room for kWindowSamples if `plan.steady` is set.
WarmUp warm_up(LoadedMethod& method, const std::vector<std::optional<Input>>& inputs, const Plan& plan, std::int64_t* window) {
  WarmUp done{0, 0, 0, plan.steady ? std::optional<bool>(false) : std::nullopt};
  if (plan.warmup == 0 && !plan.steady) return done;
  report_progress("WARMUP", 0, 0);
  const std::int64_t start = now_ns();
  std::int64_t reported = 0;
  // Returns false once the time is up: more iterations would not warm the program up further.
  const auto iterate = [&](std::int64_t* sample) {
    const Span span = method.execute(inputs);
    if (sample) *sample = span.ns();
    ++done.iterations;
    done.elapsed_ns = span.end - start;
    if (done.elapsed_ns >= plan.max_warmup_ns) return false;
    if (done.elapsed_ns - reported >= kProgressNs) {
      report_progress("WARMUP", done.iterations, done.elapsed_ns);
      reported = done.elapsed_ns;
    }
    return true;
  };

  while (done.iterations < plan.warmup) {
    if (!iterate(nullptr)) return done;
  }
  peak_rss_bytes();  // memory of first executions belongs to the program, and no sample was written yet
  std::deque<std::int64_t> medians;
  while (plan.steady) {
    const std::int64_t begun = done.elapsed_ns;
    std::int64_t count = 0;
    while (count < kWindowIterations || (done.elapsed_ns - begun < kWindowNs && count < kWindowSamples)) {
      done.samples = std::max(done.samples, count + 1);
      if (!iterate(window + count)) return done;
      ++count;
    }
    std::nth_element(window, window + count / 2, window + count);
    medians.push_back(window[count / 2]);
    if (medians.size() > kWindows) medians.pop_front();
    const auto [low, high] = std::minmax_element(medians.begin(), medians.end());
    if (medians.size() == kWindows && *high - *low <= std::max(*low / kSteadyShare, kSteadyNs)) {
      done.steady = true;
      return done;
    }
  }
  return done;
}

}  // namespace

void report_progress(const char* stage, std::int64_t done, std::int64_t elapsed_ns) {
  Channel::get().send(Json().text("event", "progress").text("stage", stage).number("done", done).number("elapsed_ns", elapsed_ns));
}

void add_counters(Json& result, const Usage& before, const Usage& after) {
  result.number("wall_ns", after.wall_ns - before.wall_ns)
      .number("cpu_ns", difference(after.cpu_ns, before.cpu_ns))
      .number("voluntary_switches", difference(after.voluntary_switches, before.voluntary_switches))
      .number("involuntary_switches", difference(after.involuntary_switches, before.involuntary_switches))
      .number("minor_faults", difference(after.minor_faults, before.minor_faults))
      .number("major_faults", difference(after.major_faults, before.major_faults))
      .number("cpu_pressure_us", difference(after.pressure_us, before.pressure_us));
}

void measure(Session& session, const Plan& plan, Json result) {
  LoadedMethod& method = session.ready();
  if (method.tracer()) throw Failure{"BAD_STATE", "the method is loaded with a tracer, which costs time; load it without", "", {}};
  const auto& inputs = session.inputs();
  // Later samples touch these pages. They belong to the runner, so the peak RSS is reported without them.
  const std::int64_t capacity = std::max(plan.max_samples, plan.steady ? kWindowSamples : 0);
  const Pages buffer(static_cast<std::size_t>(capacity) * sizeof(std::int64_t), Pages::For::Us);
  auto* samples = reinterpret_cast<std::int64_t*>(buffer.data());

  peak_rss_bytes();
  const WarmUp warmed = warm_up(method, inputs, plan, samples);

  report_progress("TIMED", 0, 0);
  std::int64_t count = 0;
  std::int64_t elapsed = 0;
  const char* stop_reason = nullptr;
  const Usage before = Usage::now();
  const std::int64_t start = now_ns();
  for (std::int64_t reported = 0; !stop_reason;) {
    const Span span = method.execute(inputs);
    samples[count++] = span.ns();
    elapsed = span.end - start;
    if (count >= plan.iterations && elapsed >= plan.min_time_ns) {
      stop_reason = "ENOUGH";
    } else if (count >= plan.max_samples) {
      stop_reason = "MAX_SAMPLES";
    } else if (elapsed >= plan.max_time_ns) {
      stop_reason = "MAX_TIME";
    } else if (elapsed - reported >= kProgressNs) {
      report_progress("TIMED", count, elapsed);
      reported = elapsed;
    }
  }
  const Usage after = Usage::now();
  const auto peak = peak_rss_bytes(std::max(count, warmed.samples) * static_cast<std::int64_t>(sizeof(std::int64_t)));

  result.number("warmup", warmed.iterations).number("warmup_ns", warmed.elapsed_ns);
  warmed.steady ? result.boolean("steady", *warmed.steady) : result.null("steady");
  result.number("first_run_ns", method.first_run_ns)
      .number("iterations", count)
      .number("duration_ns", elapsed)
      .text("stop_reason", stop_reason);
  add_counters(result, before, after);
  result.number("peak_rss_bytes", peak)
      .number("payload_bytes", count * static_cast<std::int64_t>(sizeof(std::int64_t)));
  Channel::get().send(result, samples, static_cast<std::size_t>(count) * sizeof(std::int64_t));
}

void trace(Session& session, std::int64_t warmup, std::int64_t iterations, const std::string& path, Json result) {
  LoadedMethod& method = session.ready();
  if (!method.tracer() || method.debugging()) throw Failure{"BAD_STATE", "trace needs the method loaded with trace=1 debug=0", "", {}};
  const auto& inputs = session.inputs();
  report_progress("TRACED", 0, 0);
  for (std::int64_t i = 0; i < warmup; ++i) method.execute(inputs);
  if (warmup > 0) method.tracer()->reset();  // cold iterations would distort the means of the profile

  std::vector<std::int64_t> samples;
  samples.reserve(static_cast<std::size_t>(iterations));
  const Usage before = Usage::now();
  const std::int64_t start = now_ns();
  for (std::int64_t i = 0, reported = start; i < iterations; ++i) {
    const Span span = method.execute(inputs);
    samples.push_back(span.ns());
    if (span.end - reported >= kProgressNs) {
      report_progress("TRACED", i + 1, span.end - start);
      reported = span.end;
    }
  }
  const Usage after = Usage::now();
  const std::size_t size = write_etdump(*method.tracer(), path);
  const std::size_t bytes = samples.size() * sizeof(std::int64_t);
  result.number("iterations", iterations).number("etdump_bytes", static_cast<std::int64_t>(size));
  add_counters(result, before, after);
  result.number("payload_bytes", static_cast<std::int64_t>(bytes));
  Channel::get().send(result, samples.data(), bytes);
}

Json debug(Session& session, const std::string& path, const std::string& dump, std::size_t max_bytes, Json result) {
  LoadedMethod& method = session.ready();
  if (!method.debugging()) throw Failure{"BAD_STATE", "debug needs the method loaded with trace=1 debug=1", "", {}};
  report_progress("DEBUG", 0, 0);
  DumpFile sink(dump, max_bytes);
  method.tracer()->set_data_sink(&sink);
  std::int64_t took = 0;
  std::size_t size = 0;
  try {
    took = method.execute(session.inputs()).ns();
    sink.close();
    size = write_etdump(*method.tracer(), path);
  } catch (...) {
    method.tracer()->set_data_sink(nullptr);
    throw;
  }
  method.tracer()->set_data_sink(nullptr);
  const auto dumped = static_cast<std::int64_t>(sink.get_used_bytes());
  return result.number("run_ns", took).number("etdump_bytes", static_cast<std::int64_t>(size)).number("dump_bytes", dumped);
}

}  // namespace etfarm

#include "generation.h"

#include "passes.h"
#include "system.h"
#include "token_methods.h"

namespace etfarm {
namespace {

// One repetition's row in the payload.
struct Row {
  std::int64_t* prefill_ns;
  std::int64_t* token_ns;
  std::int64_t* tokens;
  std::int64_t* parts;  // for each method of a flow: executions and ns until the prompt's last logits, and after
};
constexpr std::size_t kPartColumns = 4;

class Loop {
 public:
  Loop(Session& session, const Generation& plan) : session_(session), plan_(plan) { model_.emplace(session, plan); }

  // Prepares the methods' state for a repetition. What a repetition writes lies behind the context, which therefore stays.
  void prepare() {
    if (is_prepared_ && !plan_.reload) return;
    if (plan_.reload && model_->has_run()) {
      model_.reset();
      bool keep = false;
      for (const auto& name : plan_.names()) {
        session_.load_method(name, false, false, keep);
        keep = true;
      }
      model_.emplace(session_, plan_);
    }
    is_prepared_ = true;
    model_->process(plan_.context, 0, plan_.depth);
  }

  void repeat(const Row& row, const char* stage, std::int64_t begun) {
    auto end = static_cast<std::int64_t>(plan_.context.size());
    model_->take_parts();
    const std::int64_t start = now_ns();
    const std::int64_t encoded = model_->encode(plan_.depth);
    model_->process(plan_.context, plan_.depth, end, encoded);
    *row.prefill_ns = now_ns() - start;
    row.tokens[0] = model_->next_token();
    row.token_ns[0] = now_ns() - start;
    end += encoded;
    write_parts(row.parts);
    for (std::int64_t i = 1; i < plan_.tokens; ++i) {
      const std::int64_t from = now_ns();
      model_->step(row.tokens[i - 1], end + i - 1);
      row.tokens[i] = model_->next_token();
      const std::int64_t to = now_ns();
      row.token_ns[i] = to - from;
      if (to - reported_ >= kProgressNs) {
        report_progress(stage, generated_ + i + 1, to - begun);
        reported_ = to;
      }
    }
    write_parts(row.parts + 2);
    generated_ += plan_.tokens;
    if (!first_run_ns_) first_run_ns_ = model_->prefill().method().first_run_ns;
  }

  void enter(const char* stage) {
    generated_ = 0;
    reported_ = now_ns();
    report_progress(stage, 0, 0);
  }

  LanguageModel& model() { return *model_; }
  std::optional<std::int64_t> first_run_ns() const { return first_run_ns_; }

 private:
  void write_parts(std::int64_t* columns) {
    for (const Part& part : model_->take_parts()) {
      columns[0] = part.executions;
      columns[1] = part.ns;
      columns += kPartColumns;
    }
  }

  Session& session_;
  const Generation& plan_;
  std::optional<LanguageModel> model_;
  std::optional<std::int64_t> first_run_ns_;
  bool is_prepared_ = false;
  std::int64_t generated_ = 0;
  std::int64_t reported_ = 0;
};

}  // namespace

void generate(Session& session, const Generation& plan, Json result) {
  const std::vector<std::string> names = plan.names();
  for (const auto& name : names) {
    if (session.loaded(name).tracer()) throw Failure{"BAD_STATE", "method '" + name + "' is loaded with a tracer, which costs time", "", {}};
  }
  // The rows of the warm-up are overwritten by those of the first repetition.
  const std::size_t parts = plan.embedding.empty() ? 0 : names.size() * kPartColumns;
  const auto width = static_cast<std::size_t>(1 + 2 * plan.tokens) + parts;
  const Pages buffer(static_cast<std::size_t>(plan.repetitions) * width * sizeof(std::int64_t), Pages::For::Us);
  const auto row = [&](std::int64_t index) {
    std::int64_t* begin = reinterpret_cast<std::int64_t*>(buffer.data()) + static_cast<std::size_t>(index) * width;
    return Row{begin, begin + 1, begin + 1 + plan.tokens, begin + 1 + 2 * plan.tokens};
  };

  Loop loop(session, plan);
  if (plan.warmup > 0) loop.enter("WARMUP");
  const std::int64_t warmup_start = now_ns();
  for (std::int64_t i = 0; i < plan.warmup; ++i) {
    loop.prepare();
    loop.repeat(row(0), "WARMUP", warmup_start);
  }
  const std::int64_t warmup_ns = now_ns() - warmup_start;
  loop.prepare();

  loop.enter("TIMED");
  std::int64_t done = 0;
  const Usage before = Usage::now();
  const std::int64_t start = now_ns();
  std::int64_t elapsed = 0;
  while (done < plan.repetitions && (done == 0 || elapsed < plan.max_time_ns)) {
    if (done > 0) loop.prepare();
    loop.repeat(row(done), "TIMED", start);
    ++done;
    elapsed = now_ns() - start;
  }
  const Usage after = Usage::now();
  const std::size_t bytes = static_cast<std::size_t>(done) * width * sizeof(std::int64_t);
  const auto peak = peak_rss_bytes(static_cast<std::int64_t>(bytes));

  result.number("warmup", plan.warmup)
      .number("warmup_ns", warmup_ns)
      .number("repetitions", done)
      .number("tokens", plan.tokens)
      .number("duration_ns", elapsed)
      .text("stop_reason", done < plan.repetitions ? "MAX_TIME" : "ENOUGH")
      .number("first_run_ns", loop.first_run_ns())
      .number("vocabulary", loop.model().vocabulary());
  add_counters(result, before, after);
  result.number("peak_rss_bytes", peak).number("payload_bytes", static_cast<std::int64_t>(bytes));
  Channel::get().send(result, buffer.data(), bytes);
}

}  // namespace etfarm

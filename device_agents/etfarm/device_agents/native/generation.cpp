#include "generation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "passes.h"
#include "system.h"

namespace etfarm {
namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::EValue;

void store(Bytes& bytes, ScalarType type, std::int64_t index, std::int64_t value) {
  if (type == ScalarType::Int) {
    const auto narrow = static_cast<std::int32_t>(value);
    std::memcpy(bytes.data() + static_cast<std::size_t>(index) * sizeof(narrow), &narrow, sizeof(narrow));
  } else {
    std::memcpy(bytes.data() + static_cast<std::size_t>(index) * sizeof(value), &value, sizeof(value));
  }
}

// Returns the index of the largest value, the lowest of equal ones; -1 where no value is above minus infinity.
template <typename T>
std::int64_t argmax(const T* values, std::int64_t count) {
  std::int64_t best = -1;
  float largest = -std::numeric_limits<float>::infinity();
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(values[i]);
    if (value > largest) {
      largest = value;
      best = i;
    }
  }
  return best;
}

// A loaded method of a language model, which takes tokens and their position and returns logits.
class TokenMethod {
 public:
  TokenMethod(Session& session, const std::string& name, std::size_t token_input, std::size_t position_input)
      : method_(session.loaded(name)), inputs_(session.inputs(name)), token_index_(token_input), position_index_(position_input) {
    if (position_input == token_input) refuse("the tokens and their positions must be different inputs");
    tokens_ = describe(session, token_input, "tokens");
    positions_ = describe(session, position_input, "positions");
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (i != token_input && i != position_input && !inputs_[i]) refuse("input " + std::to_string(i) + " is not set");
    }
  }

  // Maximum number of tokens of one execution, and the minimum, which equals it where the shape is static.
  std::int64_t most() const { return tokens_.shape.back(); }
  std::int64_t least() const { return tokens_.dynamic ? 1 : most(); }
  LoadedMethod& method() { return method_; }

  void execute(const std::int64_t* tokens, std::int64_t count, std::int64_t position) {
    if (count != count_) {
      set(token_index_, tokens_, count);
      set(position_index_, positions_, takes_start() ? 1 : count);
      count_ = count;
    }
    Bytes& ids = inputs_[token_index_]->bytes();
    for (std::int64_t i = 0; i < count; ++i) store(ids, tokens_.type, i, tokens[i]);
    Bytes& positions = inputs_[position_index_]->bytes();
    for (std::int64_t i = 0; i < (takes_start() ? 1 : count); ++i) store(positions, positions_.type, i, position + i);
    method_.execute(inputs_);
  }

  // Number of logits for each token, by the latest execution.
  std::int64_t vocabulary() { return logits().sizes().back(); }

  // Returns the most likely token after the last one of the latest execution.
  std::int64_t next_token() {
    const Tensor values = logits();
    const std::int64_t count = values.sizes().back();
    const std::int64_t first = static_cast<std::int64_t>(values.numel()) - count;  // the last row
    std::int64_t best = -1;
    switch (values.scalar_type()) {
      case ScalarType::Float:
        best = argmax(values.const_data_ptr<float>() + first, count);
        break;
      case ScalarType::Half:
        best = argmax(values.const_data_ptr<executorch::aten::Half>() + first, count);
        break;
      case ScalarType::BFloat16:
        best = argmax(values.const_data_ptr<executorch::aten::BFloat16>() + first, count);
        break;
      default:
        refuse(std::string("logits must be float32, float16 or bfloat16, not ") + dtype_name(values.scalar_type()));
    }
    if (best < 0) throw Failure{"RUNTIME", "method '" + method_.name() + "' returned logits without a largest one: all are NaN or -inf", "", {}};
    return best;
  }

 private:
  // Whether the method takes the position of the first token only.
  bool takes_start() const { return positions_.shape.back() == 1; }

  [[noreturn]] void refuse(const std::string& why) const {
    throw Failure{"INPUT_MISMATCH", "method '" + method_.name() + "' cannot generate text: " + why, "", {}};
  }

  ExpectedTensor describe(Session& session, std::size_t index, const char* what) {
    const std::string input = "input " + std::to_string(index) + " (" + what + ")";
    if (index >= inputs_.size()) refuse(input + " does not exist: it takes " + std::to_string(inputs_.size()));
    if (!method_.input(index).isTensor()) refuse(input + " is not a tensor");
    ExpectedTensor tensor = session.expected(method_, index);
    if (tensor.type != ScalarType::Long && tensor.type != ScalarType::Int) {
      refuse(input + " must be int64 or int32, not " + dtype_name(tensor.type));
    }
    std::int64_t elements = 1;
    for (const auto size : tensor.shape) elements *= size;
    if (tensor.shape.empty() || elements < 1 || elements != tensor.shape.back()) {
      refuse(input + " must have the shape [1, tokens] or [tokens], not " + shape_text(tensor.shape));
    }
    return tensor;
  }

  void set(std::size_t index, const ExpectedTensor& tensor, std::int64_t count) {
    const bool fits = tensor.dynamic ? count <= tensor.shape.back() : count == tensor.shape.back();
    if (!fits) {
      refuse("input " + std::to_string(index) + " takes " + std::to_string(tensor.shape.back()) + (tensor.dynamic ? " tokens at most" : " tokens") +
             ", not " + std::to_string(count));
    }
    std::vector<std::int64_t> shape = tensor.shape;
    shape.back() = count;
    inputs_[index] = Input::tensor(tensor.type, shape, tensor.dim_order, Bytes(static_cast<std::size_t>(count) * item_bytes(tensor.type)));
  }

  Tensor logits() {
    const EValue& value = method_.method().get_output(0);
    if (!value.isTensor() || value.toTensor().dim() == 0 || value.toTensor().numel() == 0) refuse("its first output must be logits");
    return value.toTensor();
  }

  LoadedMethod& method_;
  std::vector<std::optional<Input>> inputs_;
  std::size_t token_index_;
  std::size_t position_index_;
  ExpectedTensor tokens_{};
  ExpectedTensor positions_{};
  std::int64_t count_ = 0;
};

// Both methods of a language model.
class Model {
 public:
  Model(Session& session, const Generation& plan)
      : plan_(plan), prefill_(session, plan.prefill, plan.token_input, plan.position_input) {
    if (plan.decode != plan.prefill) decode_.emplace(session, plan.decode, plan.token_input, plan.position_input);
    latest_ = &prefill_;
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  TokenMethod& prefill() { return prefill_; }
  TokenMethod& decode() { return decode_ ? *decode_ : prefill_; }
  bool has_run() { return prefill_.method().first_run_ns || decode().method().first_run_ns; }

  // Processes the tokens from `begin` to `end` of `context` in chunks; where a chunk is too short for prefill, one by one.
  void process(const std::vector<std::int64_t>& context, std::int64_t begin, std::int64_t end) {
    const std::int64_t largest = std::min(plan_.max_chunk, prefill_.most());
    while (begin < end) {
      const std::int64_t chunk = std::min(largest, end - begin);
      const bool together = chunk >= prefill_.least();
      latest_ = together ? &prefill_ : &decode();
      const std::int64_t count = together ? chunk : 1;
      latest_->execute(context.data() + begin, count, begin);
      begin += count;
    }
  }

  // Processes one token.
  void step(std::int64_t token, std::int64_t position) {
    latest_ = &decode();
    latest_->execute(&token, 1, position);
  }

  std::int64_t next_token() { return latest_->next_token(); }
  std::int64_t vocabulary() { return latest_->vocabulary(); }

 private:
  const Generation& plan_;
  TokenMethod prefill_;
  std::optional<TokenMethod> decode_;
  TokenMethod* latest_;
};

// One repetition's row in the payload.
struct Row {
  std::int64_t* prefill_ns;
  std::int64_t* token_ns;
  std::int64_t* tokens;
};

class Loop {
 public:
  Loop(Session& session, const Generation& plan) : session_(session), plan_(plan) { model_.emplace(session, plan); }

  // Prepares the methods' state for a repetition. What a repetition writes lies behind the context, which therefore stays.
  void prepare() {
    if (is_prepared_ && !plan_.reload) return;
    if (plan_.reload && model_->has_run()) {
      model_.reset();
      session_.load_method(plan_.prefill, false, false, false);
      if (plan_.decode != plan_.prefill) session_.load_method(plan_.decode, false, false, true);
      model_.emplace(session_, plan_);
    }
    is_prepared_ = true;
    model_->process(plan_.context, 0, plan_.depth);
  }

  void repeat(const Row& row, const char* stage, std::int64_t begun) {
    const auto end = static_cast<std::int64_t>(plan_.context.size());
    const std::int64_t start = now_ns();
    model_->process(plan_.context, plan_.depth, end);
    *row.prefill_ns = now_ns() - start;
    row.tokens[0] = model_->next_token();
    row.token_ns[0] = now_ns() - start;
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
    generated_ += plan_.tokens;
    if (!first_run_ns_) first_run_ns_ = model_->prefill().method().first_run_ns;
  }

  void enter(const char* stage) {
    generated_ = 0;
    reported_ = now_ns();
    report_progress(stage, 0, 0);
  }

  Model& model() { return *model_; }
  std::optional<std::int64_t> first_run_ns() const { return first_run_ns_; }

 private:
  Session& session_;
  const Generation& plan_;
  std::optional<Model> model_;
  std::optional<std::int64_t> first_run_ns_;
  bool is_prepared_ = false;
  std::int64_t generated_ = 0;
  std::int64_t reported_ = 0;
};

}  // namespace

void generate(Session& session, const Generation& plan, Json result) {
  for (const auto* name : {&plan.prefill, &plan.decode}) {
    if (session.loaded(*name).tracer()) throw Failure{"BAD_STATE", "method '" + *name + "' is loaded with a tracer, which costs time", "", {}};
  }
  // The rows of the warm-up are overwritten by those of the first repetition.
  const auto width = static_cast<std::size_t>(1 + 2 * plan.tokens);
  const Pages buffer(static_cast<std::size_t>(plan.repetitions) * width * sizeof(std::int64_t), Pages::For::Us);
  const auto row = [&](std::int64_t index) {
    std::int64_t* begin = reinterpret_cast<std::int64_t*>(buffer.data()) + static_cast<std::size_t>(index) * width;
    return Row{begin, begin + 1, begin + 1 + plan.tokens};
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

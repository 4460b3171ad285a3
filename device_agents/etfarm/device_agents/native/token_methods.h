// A language model's methods: they take tokens and their positions, and return logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "session.h"

namespace etfarm {

struct ModelMethods {
  std::string prefill;  // the method that takes several tokens
  std::string decode;   // the method that takes one token; may be the same
  std::size_t token_input;
  std::size_t position_input;
  std::int64_t max_chunk;  // maximum number of tokens of one execution
};

// A loaded method of a language model, which takes tokens and their position and returns logits.
class TokenMethod {
 public:
  TokenMethod(Session& session, const std::string& name, std::size_t token_input, std::size_t position_input);

  // Maximum number of tokens of one execution, and the minimum, which equals it where the shape is static.
  std::int64_t most() const { return tokens_.shape.back(); }
  std::int64_t least() const { return tokens_.dynamic ? 1 : most(); }
  LoadedMethod& method() { return method_; }

  // Executes once; `position` is that of the first token.
  void execute(const std::int64_t* tokens, std::int64_t count, std::int64_t position);

  // Number of logits for each token, by the latest execution.
  std::int64_t vocabulary() { return logits().sizes().back(); }

  // Returns the most likely token after the last one of the latest execution.
  std::int64_t next_token();

  // Sets `values` to the logits after the last token of the latest execution.
  void last_logits(std::vector<float>& values);

 private:
  // Whether the method takes the position of the first token only.
  bool takes_start() const { return positions_.shape.back() == 1; }

  [[noreturn]] void refuse(const std::string& why) const;
  ExpectedTensor describe(Session& session, std::size_t index, const char* what);
  void set(std::size_t index, const ExpectedTensor& tensor, std::int64_t count);
  executorch::aten::Tensor logits();

  LoadedMethod& method_;
  std::vector<std::optional<Input>> inputs_;
  std::size_t token_index_;
  std::size_t position_index_;
  ExpectedTensor tokens_{};
  ExpectedTensor positions_{};
  std::int64_t count_ = 0;
};

// Both methods of a language model. `methods` must outlive it.
class LanguageModel {
 public:
  LanguageModel(Session& session, const ModelMethods& methods);
  LanguageModel(const LanguageModel&) = delete;
  LanguageModel& operator=(const LanguageModel&) = delete;

  TokenMethod& prefill() { return prefill_; }
  TokenMethod& decode() { return decode_ ? *decode_ : prefill_; }
  bool has_run() { return prefill_.method().first_run_ns || decode().method().first_run_ns; }

  // Processes the tokens from `begin` to `end` of `context` in chunks; where a chunk is too short for prefill, one by one.
  void process(const std::vector<std::int64_t>& context, std::int64_t begin, std::int64_t end);

  // Processes one token.
  void step(std::int64_t token, std::int64_t position);

  // Of the latest execution, by either method.
  std::int64_t next_token() { return latest_->next_token(); }
  std::int64_t vocabulary() { return latest_->vocabulary(); }
  void last_logits(std::vector<float>& values) { latest_->last_logits(values); }

 private:
  const ModelMethods& methods_;
  TokenMethod prefill_;
  std::optional<TokenMethod> decode_;
  TokenMethod* latest_;
};

}  // namespace etfarm

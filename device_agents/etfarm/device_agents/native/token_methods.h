// A language model's methods: they take tokens, or their embeddings, and positions, and return logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flow.h"
#include "session.h"

namespace etfarm {

struct ModelMethods {
  std::string prefill;  // the method that takes several tokens
  std::string decode;   // the method that takes one token; may be the same
  std::size_t token_input;
  std::size_t position_input;
  std::int64_t max_chunk;  // maximum number of tokens of one execution
  std::string embedding;   // the method that computes the embeddings, which the others then take; empty where they take tokens
  std::vector<std::string> encoders;  // the methods whose embeddings begin each prompt

  std::vector<std::string> names() const;  // all methods, each once, in the order of execution
};

// Describes an input that takes a row of tokens or positions, [1, n] or [n]; a Failure if it does not.
ExpectedTensor expected_row(Session& session, LoadedMethod& method, std::size_t index, std::size_t inputs, const char* what);
// Returns an input of `count` integers, which are not set; a Failure if the method does not take as many.
Input integers(LoadedMethod& method, std::size_t index, const ExpectedTensor& tensor, std::int64_t count);
// Writes values as int64 or int32.
void store(Bytes& bytes, executorch::aten::ScalarType type, const std::int64_t* values, std::int64_t count);

// A loaded method of a language model, which takes tokens and their position and returns logits. With `embedding` it takes the
// embeddings that this method computes of the tokens.
class TokenMethod {
 public:
  TokenMethod(Session& session, const std::string& name, std::size_t token_input, std::size_t position_input, TokenEmbedding* embedding = nullptr);

  // Maximum number of tokens of one execution, and the minimum, which equals it where the shape is static.
  std::int64_t most() const { return tokens_.shape[length_dim()]; }
  std::int64_t least() const { return tokens_.dynamic ? 1 : most(); }
  LoadedMethod& method() { return method_; }

  // Executes once; `position` is that of the first token.
  void execute(const std::int64_t* tokens, std::int64_t count, std::int64_t position);
  // Executes embeddings once.
  void execute_rows(const std::uint8_t* rows, std::int64_t count, std::int64_t position);

  // The embeddings that the method takes.
  RowType row() const { return {tokens_.type, tokens_.shape.back(), method_.name()}; }
  Part part;  // of a method that takes embeddings

  // Number of logits for each token, by the latest execution.
  std::int64_t vocabulary() { return logits().sizes().back(); }

  // Returns the most likely token after the last one of the latest execution.
  std::int64_t next_token();

  // Sets `values` to the logits after the last token of the latest execution.
  void last_logits(std::vector<float>& values);

 private:
  // Whether the method takes the position of the first token only.
  bool takes_start() const { return positions_.shape.back() == 1; }

  // The dim of the input that is the number of tokens.
  std::size_t length_dim() const { return tokens_.shape.size() - (embedding_ ? 2 : 1); }

  [[noreturn]] void refuse(const std::string& why) const;
  ExpectedTensor expected_embeddings(Session& session);
  void prepare(std::int64_t count);
  void execute_prepared(std::int64_t position);
  executorch::aten::Tensor logits();

  LoadedMethod& method_;
  TokenEmbedding* embedding_;
  std::vector<std::optional<Input>> inputs_;
  std::size_t token_index_;
  std::size_t position_index_;
  ExpectedTensor tokens_{};
  ExpectedTensor positions_{};
  std::int64_t count_ = 0;
};

// The methods of a language model. `methods` must outlive it.
class LanguageModel {
 public:
  LanguageModel(Session& session, const ModelMethods& methods);
  LanguageModel(const LanguageModel&) = delete;
  LanguageModel& operator=(const LanguageModel&) = delete;

  TokenMethod& prefill() { return prefill_; }
  TokenMethod& decode() { return decode_ ? *decode_ : prefill_; }
  bool has_run() { return prefill_.method().first_run_ns || decode().method().first_run_ns; }

  // Processes the tokens from `begin` to `end` of `context` in chunks; where a chunk is too short for prefill, one by one. The
  // position of a token is its place in `context` and `shift`.
  void process(const std::vector<std::int64_t>& context, std::int64_t begin, std::int64_t end, std::int64_t shift = 0);

  // Executes the encoders and processes their embeddings as `process` does; returns the number of positions that they have.
  std::int64_t encode(std::int64_t position);

  // Processes one token.
  void step(std::int64_t token, std::int64_t position);

  // Of the latest execution, by either method.
  std::int64_t next_token() { return latest_->next_token(); }
  std::int64_t vocabulary() { return latest_->vocabulary(); }
  void last_logits(std::vector<float>& values) { latest_->last_logits(values); }

  // Returns what each of ModelMethods.names() took since the last call; nothing for models that take tokens.
  std::vector<Part> take_parts();

 private:
  // Returns how many of `left` tokens or rows the next execution processes, and makes its method the latest.
  std::int64_t next_chunk(std::int64_t left);

  const ModelMethods& methods_;
  std::vector<std::unique_ptr<Encoder>> encoders_;
  std::optional<TokenEmbedding> embedding_;
  Bytes rows_;
  TokenMethod prefill_;
  std::optional<TokenMethod> decode_;
  TokenMethod* latest_;
};

}  // namespace etfarm

// The methods that compute the embeddings of a decoder: of tokens, and of images or sounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "session.h"

namespace etfarm {

// A method's executions since the last call of `take`, and their time with setting the inputs.
struct Part {
  std::int64_t executions = 0;
  std::int64_t ns = 0;

  void add(std::int64_t since) {
    ++executions;
    ns += now_ns() - since;
  }
  Part take() {
    const Part taken = *this;
    *this = Part{};
    return taken;
  }
};

// What a decoder takes for each position: `width` values of a floating-point type.
struct RowType {
  executorch::aten::ScalarType type;
  std::int64_t width;
  std::string decoder;  // its name, for errors

  std::size_t bytes() const;
};

// The loaded method that turns tokens into embeddings.
class TokenEmbedding {
 public:
  TokenEmbedding(Session& session, const std::string& name);

  // Writes the rows of the tokens to `rows`, in several executions where one does not take all of them.
  void embed(const std::int64_t* tokens, std::int64_t count, const RowType& row, std::uint8_t* rows);

  LoadedMethod& method() { return method_; }
  Part part;

 private:
  LoadedMethod& method_;
  std::vector<std::optional<Input>> inputs_;
  ExpectedTensor tokens_{};
  std::int64_t count_ = 0;
};

// A loaded method that turns the inputs that were set for it into embeddings.
class Encoder {
 public:
  Encoder(Session& session, const std::string& name);

  // Executes once, copies the embeddings to `rows`, and returns the number of positions.
  std::int64_t encode(const RowType& row, Bytes& rows);

  LoadedMethod& method() { return method_; }
  Part part;

 private:
  LoadedMethod& method_;
  const std::vector<std::optional<Input>>& inputs_;
};

}  // namespace etfarm

// Text generation: the loop over a language model's executions, greedy and timed token by token.
#pragma once

#include <cstdint>
#include <vector>

#include "session.h"
#include "token_methods.h"

namespace etfarm {

struct Generation : ModelMethods {
  std::vector<std::int64_t> context;  // the tokens of the context, then those of the prompt
  std::int64_t depth;                 // number of tokens in the context before the prompt
  std::int64_t tokens;                // number of tokens to generate
  std::int64_t warmup;
  std::int64_t repetitions;
  std::int64_t max_time_ns;  // no further repetition starts after it
  bool reload;               // whether to load the methods again before each repetition
};

// Fills the context, then processes the prompt and generates tokens, again and again, and sends the `result` event with the
// times and tokens as its payload. The methods must be loaded.
void generate(Session& session, const Generation& plan, Json result);

}  // namespace etfarm

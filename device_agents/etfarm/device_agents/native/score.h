// Teacher forcing: the logits of a language model after given tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "session.h"
#include "token_methods.h"

namespace etfarm {

struct Score : ModelMethods {
  std::vector<std::int64_t> tokens;
  std::int64_t window;             // number of tokens in one context; token i is at position i modulo `window`
  std::vector<std::int64_t> rows;  // indices in `tokens`, ascending: after these, all logits are returned
  std::int64_t max_time_ns;        // no further token is executed after it
  bool reload;                     // whether to load the methods again before each window
};

// Executes the tokens one by one and sends the `result` event with their scores as its payload. The methods must be loaded.
void score(Session& session, const Score& plan, Json result);

}  // namespace etfarm

// Generation of one text whose tokens are sent as they come.
#pragma once

#include <cstdint>
#include <vector>

#include "session.h"
#include "token_methods.h"

namespace etfarm {

struct Stream : ModelMethods {
  std::vector<std::int64_t> context;  // the tokens of the context, then those of the prompt
  std::int64_t depth;                 // number of tokens that the methods have executed before
  std::int64_t tokens;                // maximum number of tokens to generate
  std::vector<std::int64_t> stop_tokens;
  std::int64_t max_time_ns;
};

// Processes the prompt and generates tokens until there are enough, one is a stop token, the time is over or another command
// waits. Sends `tokens` events, then the `result`. The methods must be loaded.
void stream(Session& session, const Stream& plan, Json result);

}  // namespace etfarm

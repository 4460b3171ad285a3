// The log of the ExecuTorch runtime, which is the only place where it states the reason of a failure.
#pragma once

#include <string>
#include <vector>

namespace etfarm::log {

// Captures the runtime's log and std::terminate. Each line is sent as a `log` event at once, so that the caller receives it
// even if the next instruction is abort().
void capture();

// Marks the start of a command, after which recent() is empty.
void begin_command();

// The latest lines since begin_command(), oldest first, at most 40.
std::vector<std::string> recent();

// The runtime's explanation of a failure: the first line logged as an error, which has the cause, and the one that names the
// instruction. The lines after those only list arguments. Empty if there is none.
std::string reason();

}  // namespace etfarm::log

// What the ExecuTorch runtime says while it works: its log lines are the only place where it gives the reason of a failure.
#pragma once

#include <string>
#include <vector>

namespace etfarm::log {

// Takes over the runtime's log and std::terminate. Each line goes out as a `log` event at once, so that the caller has
// it even when the very next instruction is abort().
void capture();

// A new command begins: recent() starts anew.
void begin_command();

// The latest lines since begin_command(), oldest first, at most 40.
std::vector<std::string> recent();

// What the runtime says went wrong: the first line that it calls an error, which has the cause, and the one that names the
// instruction. What follows those only lists arguments. Empty where there is none.
std::string reason();

}  // namespace etfarm::log

#pragma once

#include <string>
#include <vector>

namespace etfarm {

// Confines this process irrevocably, and returns the measures that this kernel supports:
//   no-new-privileges  execution of a file never adds privileges.
//   landlock           files: reads and writes below the working folder; reads below each path of `readable` and what the runner
//                      needs of /dev, /proc and /sys; nothing else, and no execution.
//   seccomp            system calls: those that computing needs; neither sockets nor other processes.
//
// Call it while the process has one thread: Landlock restricts the calling thread and the threads that it starts later, whereas
// seccomp restricts all threads.
std::vector<std::string> confine(const std::vector<std::string>& readable);

}  // namespace etfarm

#pragma once

#include <string>
#include <vector>

namespace etfarm {

// Takes from this process, for good, what no program needs: new privileges, other processes, sockets, execution of files, and where
// the kernel has Landlock every file but those below the working folder and below `readable`. Gives the names of what works here.
// All threads that exist are confined too, but by Landlock, so there should be one.
std::vector<std::string> confine(const std::vector<std::string>& readable);

}  // namespace etfarm

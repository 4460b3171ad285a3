// The runner's self-test: kernels with known results, without any program.
#pragma once

#include <string>
#include <vector>

namespace etfarm {

// Returns the tested kernels and backends, in order. A Failure SELF_TEST names the first that computes a wrong result.
std::vector<std::string> self_test();

}  // namespace etfarm

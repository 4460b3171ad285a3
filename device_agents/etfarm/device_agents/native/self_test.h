// Whether this runner computes rightly at all: kernels with known results, without any program.
#pragma once

#include <string>
#include <vector>

namespace etfarm {

// What was tested, in order: kernels and backends. A Failure SELF_TEST names the first that does not do what it should.
std::vector<std::string> self_test();

}  // namespace etfarm

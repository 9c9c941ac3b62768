// Which instruction set the kernels use: the best this CPU has, or what RANKOPT_ISA or set_isa name.
#pragma once

#include <string>
#include <vector>

namespace rankopt {

enum class Isa { kScalar, kAvx2, kAvx512, kAvx512Vnni };

Isa current_isa();
// Throws std::runtime_error for a name this CPU or build does not know; "auto" is the best.
void set_isa(const std::string& name);
std::string isa_name(Isa isa);
std::vector<std::string> supported_isas();

}  // namespace rankopt

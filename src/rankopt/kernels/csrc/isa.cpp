#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace rankopt {
namespace {

struct Entry {
  Isa isa;
  const char* name;
  bool supported;
};

#if defined(__x86_64__)
// Every CPU with AVX2 so far has it. Not every compiler's __builtin_cpu_supports knows its name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

// Ascending: the last supported one is the best.
const std::vector<Entry>& entries() {
#if defined(__x86_64__)
  static const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                             __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
#else
  static const bool avx2 = false, avx512 = false, vnni = false;
#endif
  static const std::vector<Entry> all{{Isa::kScalar, "scalar", true},
                                      {Isa::kAvx2, "avx2", avx2},
                                      {Isa::kAvx512, "avx512", avx512},
                                      {Isa::kAvx512Vnni, "avx512_vnni", vnni}};
  return all;
}

Isa parse(const std::string& name) {
  if (name.empty() || name == "auto") {
    Isa best = Isa::kScalar;
    for (const Entry& entry : entries())
      if (entry.supported) best = entry.isa;
    return best;
  }
  std::string known = "auto";
  for (const Entry& entry : entries()) {
    if (entry.supported && name == entry.name) return entry.isa;
    if (entry.supported) known += std::string(", ") + entry.name;
  }
  throw std::runtime_error("RANKOPT_ISA: not an instruction set of this CPU; got '" + name +
                           "'. Allowed here: " + known + ".");
}

std::atomic<Isa>& chosen() {
  // A throw leaves the static unset, so that every call reports the bad name.
  static std::atomic<Isa> isa{[] {
    const char* name = std::getenv("RANKOPT_ISA");
    return parse(name == nullptr ? "" : name);
  }()};
  return isa;
}

}  // namespace

Isa current_isa() { return chosen().load(std::memory_order_relaxed); }

void set_isa(const std::string& name) {
  const Isa isa = parse(name);
  chosen().store(isa, std::memory_order_relaxed);
}

std::string isa_name(Isa isa) {
  for (const Entry& entry : entries())
    if (entry.isa == isa) return entry.name;
  return "scalar";
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : entries())
    if (entry.supported) names.emplace_back(entry.name);
  return names;
}

}  // namespace rankopt

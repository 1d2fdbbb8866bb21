// The instruction sets that the CPU's loops are compiled for, and the choice at run time.
//
// One library runs on every processor, with the widest vectors that the processor has. So the loops
// are templates over a struct of simd.h, which is Portable, Avx2 or Avx512, and are inlined into
// the functions of CompiledFor. Attributes of these functions choose the compiler's instruction
// set.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <string>

#include "../errors.h"

namespace inplace_ops {

// The functions that are compiled for an instruction set: block_loop.h defines them.
template <class Instructions>
struct CompiledFor;

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

#ifdef __x86_64__
inline InstructionSet best_of_processor() {
  unsigned eax, ebx, ecx, edx;  // __builtin_cpu_supports knows F16C only since g++ 11
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c)
    return InstructionSet::kBaseline;
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return InstructionSet::kAvx2;
  return InstructionSet::kAvx512;
}

// Returns the limit that the environment variable INPLACE_OPS_CPU sets. Tests use it.
inline InstructionSet limit_of_environment() {
  const char* variable = std::getenv("INPLACE_OPS_CPU");
  const std::string limit = variable ? variable : "";
  if (limit == "baseline") return InstructionSet::kBaseline;
  if (limit == "avx2") return InstructionSet::kAvx2;
  check(limit.empty() || limit == "avx512",
        "inplace_ops: the environment variable INPLACE_OPS_CPU must be baseline, avx2 or "
        "avx512, not ",
        limit);
  return InstructionSet::kAvx512;
}
#endif

// Returns the instruction set to use. The first call decides, and throws if INPLACE_OPS_CPU has an
// unknown value: ignoring it would test another instruction set than the one asked for.
inline InstructionSet instruction_set() {
#ifdef __x86_64__
  static const InstructionSet result = std::min(best_of_processor(), limit_of_environment());
  return result;
#else
  return InstructionSet::kBaseline;
#endif
}

}  // namespace inplace_ops

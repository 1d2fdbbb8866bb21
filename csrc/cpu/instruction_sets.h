// The instruction sets that the CPU's loops are compiled for, and the choice at run time.
//
// One library runs on every processor, and is to be fast on each. So the loops are templates over
// one of the structs of simd.h, Portable, Avx2 or Avx512, and are inlined into the functions of
// CompiledFor, whose attributes make the compiler use that instruction set.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string_view>

namespace inplace_ops {

// The functions that are compiled for an instruction set: block_loop.h defines them.
template <class Instructions>
struct CompiledFor;

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// Returns the best instruction set that the processor supports. To test the others,
// INPLACE_OPS_CPU=baseline or avx2 limits it.
inline InstructionSet instruction_set() {
#ifdef __x86_64__
  static const InstructionSet result = [] {
    const char* variable = std::getenv("INPLACE_OPS_CPU");
    const std::string_view limit = variable ? variable : "";
    unsigned eax, ebx, ecx, edx;  // __builtin_cpu_supports knows F16C only since g++ 11
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    if (limit == "baseline" || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !has_f16c)
      return InstructionSet::kBaseline;
    if (limit == "avx2" || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
      return InstructionSet::kAvx2;
    return InstructionSet::kAvx512;
  }();
  return result;
#else
  return InstructionSet::kBaseline;
#endif
}

}  // namespace inplace_ops

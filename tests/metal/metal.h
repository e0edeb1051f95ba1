// The part of the Metal language that the kernel uses, for clang on x86-64.
#pragma once
#include <stdint.h>
// As in Metal, a pointer without its address space is an error.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
typedef unsigned int uint;
typedef _Float16 float16_t;
typedef __bf16 bfloat16_t;
struct uint3 {
  uint x, y, z;
};

// What a lane may ask about itself.
struct Place {
  uint3 threadgroup_position_in_grid;
  uint simdgroup_index_in_threadgroup;
  uint thread_index_in_simdgroup;
  uint3 thread_position_in_grid;
  uint3 thread_position_in_threadgroup;
};

extern "C" float simd_sum(float value) __asm__("air.simd_sum.f32");
extern "C" float simd_shuffle_xor(float value, uint mask);
namespace fast {
static inline float exp(float value) {
  return __builtin_expf(value);
}
}  // namespace fast
static inline float fma(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
static inline int min(int a, int b) {
  return a < b ? a : b;
}

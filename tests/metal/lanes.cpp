// Runs the grid of a kernel one lane after another, and defines what Metal's compiler leaves open.
//
// A lane that calls simd_sum needs the operands of the 31 others. So a simdgroup runs twice: first
// all lanes, whose operands are recorded, then lane 0, which gets the sums and stores the outputs.
// This is right for kernels whose operands do not depend on a sum and where lane 0 stores. Others run
// on a grid: all lanes, again and again, until no operand changes.
#include <string.h>
#include <xmmintrin.h>

#include "metal.h"

enum { LANES = 32, MAX_CALLS = 64, SIMDGROUPS = 2, DENORMALS_ARE_ZERO = 0x8040 };
typedef void Kernel(void** buffers, const Place& place);

static float operands[MAX_CALLS][LANES];
static float sums[MAX_CALLS];
static uint n_calls;
static uint lane;

extern "C" float simd_sum(float value) {
  if (n_calls == MAX_CALLS) {
    __builtin_trap();
  }
  operands[n_calls][lane] = value;
  return sums[n_calls++];
}

static float before[MAX_CALLS][LANES];

extern "C" float simd_shuffle_xor(float value, uint mask) {
  simd_sum(value);
  return before[n_calls - 1][lane ^ mask];
}

#define AIR(name) __asm__("air." name)
extern "C" float air_convert(int value) AIR("convert.f.f32.s.i32");
extern "C" int air_min(int a, int b) AIR("min.s.i32");
extern "C" int air_clamp(int value, int least, int most) AIR("clamp.s.i32");
float air_convert(int value) {
  return float(value);
}
int air_min(int a, int b) {
  return min(a, b);
}
int air_clamp(int value, int least, int most) {
  return value < least ? least : min(value, most);
}

// Rounds to nearest, ties to even. The processor may have no instruction for it.
extern "C" bfloat16_t __truncsfbf2(float value) {
  const uint bits = __builtin_bit_cast(uint, value);
  const uint rounded = value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return __builtin_bit_cast(bfloat16_t, uint16_t(rounded >> 16));
}

// The hardware's order is not documented. Here neighbours are added first.
static float add_lanes(const float* values) {
  float left[LANES];
  for (int i = 0; i < LANES; i++) {
    left[i] = values[i];
  }
  for (int n = LANES / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; i++) {
      left[i] = left[2 * i] + left[2 * i + 1];
    }
  }
  return left[0];
}

// Writes how often each simdgroup called simd_sum, and the operands of these calls.
extern "C" void run(Kernel* kernel, void** buffers, uint n_threadgroups, uint* calls, float* log) {
  const uint mode = _mm_getcsr();
  _mm_setcsr(mode | DENORMALS_ARE_ZERO);
  for (uint i = 0; i < n_threadgroups * SIMDGROUPS; i++) {
    Place place = {{0, i / SIMDGROUPS, 0}, i % SIMDGROUPS, 0};
    for (lane = 0; lane < LANES; lane++) {
      place.thread_index_in_simdgroup = lane;
      n_calls = 0;
      kernel(buffers, place);
    }
    calls[i] = n_calls;
    for (uint call = 0; call < calls[i]; call++) {
      sums[call] = add_lanes(operands[call]);
      for (int j = 0; j < LANES; j++) {
        *log++ = operands[call][j];
      }
    }
    lane = 0;
    n_calls = 0;
    place.thread_index_in_simdgroup = lane;
    kernel(buffers, place);
  }
  _mm_setcsr(mode);
}

// Runs simdgroups along y and z, and writes the operands of all calls of simd_sum and shuffles.
extern "C" void run_grid(Kernel* kernel, void** buffers, uint n_y, uint n_z, float* log) {
  const uint mode = _mm_getcsr();
  _mm_setcsr(mode | DENORMALS_ARE_ZERO);
  for (uint i = 0; i < n_y * n_z; i++) {
    memset(operands, 0, sizeof operands);
    memset(sums, 0, sizeof sums);
    do {
      memcpy(before, operands, sizeof operands);
      for (lane = 0; lane < LANES; lane++) {
        n_calls = 0;
        const uint y = i % n_y;
        kernel(buffers, {{0, 0, 0}, 0, lane, {lane, y, i / n_y}, {lane, y, 0}});
      }
      for (uint call = 0; call < n_calls; call++) {
        sums[call] = add_lanes(operands[call]);
      }
    } while (memcmp(before, operands, sizeof operands));
    memcpy(log, operands, sizeof operands);
    log += MAX_CALLS * LANES;
  }
  _mm_setcsr(mode);
}

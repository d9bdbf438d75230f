// Shared by all kernels: how each element type is read into, and written from, the type it is computed in.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <class T> struct Compute { using type = float; };
template <> struct Compute<double> { using type = double; };

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ double widen(double v) { return v; }

// Rounds to nearest, ties to even, as torch does.
__device__ __forceinline__ void narrow(float v, float* out) { *out = v; }
__device__ __forceinline__ void narrow(float v, __half* out) { *out = __float2half_rn(v); }
__device__ __forceinline__ void narrow(float v, __nv_bfloat16* out) { *out = __float2bfloat16_rn(v); }
__device__ __forceinline__ void narrow(double v, double* out) { *out = v; }

// The compiler may not contract these two into one fused operation.
__device__ __forceinline__ float add_rounded(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add_rounded(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply_rounded(double a, double b) { return __dmul_rn(a, b); }

// y += a * x, computed in fp32 (fp64 for double) and rounded once. Any grid works: each thread strides over the n elements.
#include "common.cuh"

template <class T>
__device__ __forceinline__ void accumulate(T* y, const T* x, long long n, typename Compute<T>::type a) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        // Never fused: the product is rounded before the sum, so that the torch twin gives the same bits.
        narrow(add_rounded(widen(y[i]), multiply_rounded(widen(x[i]), a)), y + i);
    }
}

extern "C" __global__ void accumulate_float(float* y, const float* x, long long n, float a) { accumulate(y, x, n, a); }
extern "C" __global__ void accumulate_double(double* y, const double* x, long long n, double a) { accumulate(y, x, n, a); }
extern "C" __global__ void accumulate_half(__half* y, const __half* x, long long n, float a) { accumulate(y, x, n, a); }
extern "C" __global__ void accumulate_bfloat16(__nv_bfloat16* y, const __nv_bfloat16* x, long long n, float a) {
    accumulate(y, x, n, a);
}

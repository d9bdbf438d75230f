// y += a * x, computed in fp32 (fp64 for double) and rounded once to y's type. Each block processes
// one chunk.
#include "common.cuh"

template <class Y, class X>
__device__ __forceinline__ void accumulate(Y* y, const X* x, long long n,
                                           typename Compute<Y>::type a) {
    constexpr int chunk = chunk_numel<X, Y>();
    const long long start = (long long)blockIdx.x * chunk;
    const int count = n - start < chunk ? (int)(n - start) : chunk;
    // The product is rounded before the sum, so that the torch twin gives the same bits.
    transform<true>(x + start, y + start, count, [a](X from, Y* to) {
        narrow(add_rounded(widen(*to), multiply_rounded(widen(from), a)), to);
    });
}

#define ACCUMULATE(Y, X)                                                           \
    extern "C" __global__ void accumulate_##Y##_##X(Y* y, const X* x, long long n, \
                                                    typename Compute<Y>::type a) { \
        accumulate(y, x, n, a);                                                    \
    }

ACCUMULATE(float, float)
ACCUMULATE(float, float16)
ACCUMULATE(float, bfloat16)
ACCUMULATE(float16, float)
ACCUMULATE(float16, float16)
ACCUMULATE(float16, bfloat16)
ACCUMULATE(bfloat16, float)
ACCUMULATE(bfloat16, float16)
ACCUMULATE(bfloat16, bfloat16)
ACCUMULATE(double, double)

// Blockwise int8: 256 elements share a scale, which is their largest magnitude divided by 127. A
// warp processes one block at a time, a lane 16 bytes at a time.
//
// Every operation is rounded separately and in a fixed order, so that the torch twin gives the same
// bits.
#include "common.cuh"

constexpr int BLOCK = 256;        // elements that share a scale; as in kernels/quantize.py
constexpr int CHUNK_BLOCKS = 16;  // blocks of a thread block; as in kernels/quantize.py
constexpr float MIN_NORMAL = 1.17549435e-38f, MAX_NORMAL = 3.40282347e+38f;  // of fp32

// Magnitudes as integers. They compare like the numbers, with NaN above infinity, and are not
// flushed to zero.
__device__ __forceinline__ unsigned magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }
__device__ __forceinline__ unsigned long long magnitude(double v) {
    return (unsigned long long)__double_as_longlong(v) & 0x7fffffffffffffffull;
}
__device__ __forceinline__ float number(unsigned magnitude) { return __uint_as_float(magnitude); }
__device__ __forceinline__ double number(unsigned long long magnitude) {
    return __longlong_as_double((long long)magnitude);
}

__device__ __forceinline__ int round_to_even(float v) { return __float2int_rn(v); }
__device__ __forceinline__ int round_to_even(double v) { return __double2int_rn(v); }

// Calls visit(block, count) for each of the warp's blocks; the last one may have fewer elements.
template <class F>
__device__ __forceinline__ void visit_blocks(long long n, F visit) {
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int i = warp; i < CHUNK_BLOCKS; i += warps) {
        const long long block = (long long)blockIdx.x * CHUNK_BLOCKS + i;
        const long long left = n - block * BLOCK;
        if (left <= 0) return;
        visit(block, left < BLOCK ? (int)left : BLOCK);
    }
}

// Loads this lane's elements of a block, N at a time: v[k] is at k * 32 * N + lane * N.
template <int N, class T>
__device__ __forceinline__ void load_block(const T* p, int count, Vector<T, N>* v) {
    const int lane = threadIdx.x % WARP;
    const bool is_whole = count == BLOCK && is_aligned<N>(p);
#pragma unroll
    for (int k = 0; k < BLOCK / WARP / N; k++) {
        const int at = (k * WARP + lane) * N;
        if (is_whole) {
            v[k] = load<N, true>(p + at);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++) v[k].at[j] = at + j < count ? p[at + j] : T(0);
        }
    }
}

template <int N, class T>
__device__ __forceinline__ void store_block(T* p, int count, const Vector<T, N>* v) {
    const int lane = threadIdx.x % WARP;
    const bool is_whole = count == BLOCK && is_aligned<N>(p);
#pragma unroll
    for (int k = 0; k < BLOCK / WARP / N; k++) {
        const int at = (k * WARP + lane) * N;
        if (is_whole) {
            store<N>(p + at, v[k]);
        } else {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (at + j < count) p[at + j] = v[k].at[j];
        }
    }
}

// If base is not null, x - base is quantized.
template <class T>
__device__ __forceinline__ void quantize(const T* x, const T* base, signed char* q, float* scales,
                                         long long n) {
    constexpr int N = 16 / sizeof(T), VECTORS = BLOCK / WARP / N;
    visit_blocks(n, [=](long long block, int count) {
        Vector<T, N> v[VECTORS];
        load_block<N>(x + block * BLOCK, count, v);
        if (base) {
            Vector<T, N> from[VECTORS];
            load_block<N>(base + block * BLOCK, count, from);
#pragma unroll
            for (int k = 0; k < VECTORS; k++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    v[k].at[j] = subtract_rounded(v[k].at[j], from[k].at[j]);
        }

        auto largest = magnitude(T(0));
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                const auto own = magnitude(v[k].at[j]);
                if (own > largest) largest = own;
            }
#pragma unroll
        for (int distance = 16; distance; distance /= 2) {
            const auto other = of_lane_xor(largest, distance);
            if (other > largest) largest = other;
        }

        const float scale = (float)divide_rounded(number(largest), T(127));
        const bool is_finite = scale <= MAX_NORMAL;
        // The stored scale is 0 if its inverse might overflow.
        const float stored = !is_finite           ? __uint_as_float(0x7fc00000u)
                             : scale > MIN_NORMAL ? scale
                                                  : 0.0f;
        const T inverse = divide_rounded(T(1), T(scale > MIN_NORMAL ? scale : MIN_NORMAL));
        if (threadIdx.x % WARP == 0) scales[block] = stored;

        Vector<signed char, N> out[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                out[k].at[j] =
                    is_finite ? (signed char)round_to_even(multiply_rounded(v[k].at[j], inverse))
                              : (signed char)0;
        store_block<N>(q + block * BLOCK, count, out);
    });
}

template <class T>
__device__ __forceinline__ void dequantize_add(T* target, const signed char* q, const float* scales,
                                               long long n) {
    constexpr int N = 16 / sizeof(T), VECTORS = BLOCK / WARP / N;
    visit_blocks(n, [=](long long block, int count) {
        Vector<T, N> sum[VECTORS];
        Vector<signed char, N> change[VECTORS];
        load_block<N>(target + block * BLOCK, count, sum);
        load_block<N>(q + block * BLOCK, count, change);
        const T scale = scales[block];
#pragma unroll
        for (int k = 0; k < VECTORS; k++)
#pragma unroll
            for (int j = 0; j < N; j++)
                sum[k].at[j] =
                    add_rounded(sum[k].at[j], multiply_rounded(T(change[k].at[j]), scale));
        store_block<N>(target + block * BLOCK, count, sum);
    });
}

#define QUANTIZE(T)                                                                    \
    extern "C" __global__ void quantize_##T(const T* x, const T* base, signed char* q, \
                                            float* scales, long long n) {              \
        quantize(x, base, q, scales, n);                                               \
    }                                                                                  \
    extern "C" __global__ void dequantize_add_##T(T* target, const signed char* q,     \
                                                  const float* scales, long long n) {  \
        dequantize_add(target, q, scales, n);                                          \
    }

QUANTIZE(float)
QUANTIZE(double)

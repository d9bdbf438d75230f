// Code shared by all kernels: conversion of element types to and from the type they are computed
// in, and 16-byte memory accesses.
//
// NVRTC and hipRTC compile this file without headers of a toolkit.
#pragma once

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};

// What the three compilers write differently: NVRTC for CUDA, hipRTC for ROCm, and the compiler of
// the tests, whose CPU shim defines the conversions of halves itself.
#if defined(MPIDIST_HOST)
__device__ __forceinline__ float add_rounded(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float subtract_rounded(float a, float b) { return __fadd_rn(a, -b); }
__device__ __forceinline__ float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double add_rounded(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double multiply_rounded(double a, double b) { return __dmul_rn(a, b); }
#elif defined(__HIP__)
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    return (float)__builtin_bit_cast(_Float16, bits);
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    return __builtin_bit_cast(unsigned short, (_Float16)value);
}

// HIP keeps subnormals, and contracts a product and a sum into a fused multiply-add unless it is
// told not to, by its own __fadd_rn as well.
#pragma clang fp contract(off)
__device__ __forceinline__ float add_rounded(float a, float b) { return a + b; }
__device__ __forceinline__ float subtract_rounded(float a, float b) { return a - b; }
__device__ __forceinline__ float multiply_rounded(float a, float b) { return a * b; }
__device__ __forceinline__ double add_rounded(double a, double b) { return a + b; }
__device__ __forceinline__ double multiply_rounded(double a, double b) { return a * b; }
#pragma clang fp contract(fast)
#else
__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Inline PTX, because CuPy compiles with -ftz=true, under which __fadd_rn, __fmul_rn and a negation
// flush subnormals to zero. The compiler never contracts these into a fused multiply-add.
__device__ __forceinline__ float add_rounded(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

// a - b in one instruction: add_rounded(a, -b) would negate by neg.ftz.
__device__ __forceinline__ float subtract_rounded(float a, float b) {
    float rest;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(rest) : "f"(a), "f"(b));
    return rest;
}

__device__ __forceinline__ float multiply_rounded(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}

__device__ __forceinline__ double add_rounded(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double multiply_rounded(double a, double b) { return __dmul_rn(a, b); }
#endif
__device__ __forceinline__ double subtract_rounded(double a, double b) { return add_rounded(a, -b); }

// Lanes that exchange values. AMD's wavefront of 64 is two warps here.
constexpr int WARP = 32;

// Returns the value of the lane of this warp whose number differs in the bits of mask.
template <class T>
__device__ __forceinline__ T of_lane_xor(T value, int mask) {
#if defined(__HIP__) || defined(MPIDIST_WAVE64)
    return __shfl_xor(value, mask, WARP);
#else
    return __shfl_xor_sync(0xffffffffu, value, mask);
#endif
}

// Reads what other blocks have written: from the cache that all of them share.
template <class T>
__device__ __forceinline__ T load_shared_by_blocks(const T* p) {
#ifdef __HIP__
    return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
#else
    return __ldcg(p);
#endif
}

// The type in which the arithmetic on an element type is done.
template <class T>
struct Compute {
    using type = float;
};
template <>
struct Compute<double> {
    using type = double;
};

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(float16 v) { return half_to_float(v.bits); }
__device__ __forceinline__ float widen(bfloat16 v) {
    return __uint_as_float((unsigned)v.bits << 16);
}
__device__ __forceinline__ double widen(double v) { return v; }

// Rounds to nearest, ties to even, as torch does.
__device__ __forceinline__ void narrow(float v, float* out) { *out = v; }
__device__ __forceinline__ void narrow(float v, float16* out) { out->bits = float_to_half(v); }
__device__ __forceinline__ void narrow(float v, bfloat16* out) {
    const unsigned bits = __float_as_uint(v);
    out->bits = v != v ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ __forceinline__ void narrow(double v, double* out) { *out = v; }

// N elements that one instruction reads or writes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
    T at[N];
};

template <int N, class T>
__device__ __forceinline__ bool is_aligned(const T* p) {
    return (unsigned long long)p % (sizeof(T) * N) == 0;
}

// A block's share of an element-wise kernel.
constexpr int UNROLL = 4;           // vectors in flight in each thread
constexpr int CHUNK_BYTES = 16384;  // of the wider type; the same number as in kernels/launch.py

template <int N, bool IS_ALIGNED, class T>
__device__ __forceinline__ Vector<T, N> load(const T* p) {
    if constexpr (IS_ALIGNED) {
        return *(const Vector<T, N>*)p;
    } else {
        Vector<T, N> v;
#pragma unroll
        for (int k = 0; k < N; k++) v.at[k] = p[k];
        return v;
    }
}

// Stores a whole vector at an address aligned to its size. Inline PTX, because NVRTC splits a struct
// that is in registers into one store for each element; ROCm's compiler joins them.
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Vector<T, N>& v) {
#if !defined(MPIDIST_HOST) && !defined(__HIP__)
    constexpr int BYTES = sizeof(T) * N;
    if constexpr (BYTES == 16) {
        unsigned w[4];
        memcpy(w, &v, BYTES);
        asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                     "r"(w[3])
                     : "memory");
        return;
    } else if constexpr (BYTES == 8) {
        unsigned w[2];
        memcpy(w, &v, BYTES);
        asm volatile("st.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
        return;
    } else if constexpr (BYTES == 4) {
        unsigned w;
        memcpy(&w, &v, BYTES);
        asm volatile("st.b32 [%0], %1;" ::"l"(p), "r"(w) : "memory");
        return;
    } else if constexpr (BYTES == 2) {
        unsigned short w;
        memcpy(&w, &v, BYTES);
        asm volatile("st.b16 [%0], %1;" ::"l"(p), "h"(w) : "memory");
        return;
    }
#endif
    *(Vector<T, N>*)p = v;
}

template <int N, bool READS_Y, bool IS_ALIGNED, class X, class Y, class F>
__device__ __forceinline__ void transform_vectors(const X* x, Y* y, int vectors, F f) {
    for (int first = threadIdx.x; first < vectors; first += blockDim.x * UNROLL) {
        Vector<X, N> in[UNROLL];
        Vector<Y, N> out[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int i = first + u * blockDim.x;
            if (i >= vectors) continue;
            in[u] = load<N, IS_ALIGNED>(x + i * N);
            if constexpr (READS_Y) out[u] = load<N, true>(y + i * N);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const int i = first + u * blockDim.x;
            if (i >= vectors) continue;
#pragma unroll
            for (int k = 0; k < N; k++) f(in[u].at[k], &out[u].at[k]);
            store<N>(y + i * N, out[u]);
        }
    }
}

// Calls f(x[i], &y[i]) for all n elements of a block's chunk, for any alignment of x and y: single
// elements up to the first one at which y is aligned to 16 bytes, then vectors, then single
// elements. Where x is not aligned, the elements of a vector are read one by one.
template <bool READS_Y, class X, class Y, class F>
__device__ __forceinline__ void transform(const X* x, Y* y, int n, F f) {
    constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
    int head = 0;
    while (head < n && !is_aligned<N>(y + head)) head++;
    const int vectors = (n - head) / N;
    if (is_aligned<N>(x + head))
        transform_vectors<N, READS_Y, true>(x + head, y + head, vectors, f);
    else transform_vectors<N, READS_Y, false>(x + head, y + head, vectors, f);
    const int tail = head + vectors * N;
    for (int i = threadIdx.x; i < head + n - tail; i += blockDim.x) {
        const int at = i < head ? i : i - head + tail;
        f(x[at], y + at);
    }
}

template <class X, class Y>
__device__ constexpr int chunk_numel() {
    return CHUNK_BYTES / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
}

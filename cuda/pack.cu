// Copies between many tensors and one flat buffer in one launch: value * scale, rounded once to the
// target's type.
//
// A table has one row for each block's chunk: the address of its elements in a tensor, their
// position in the flat buffer, and their number.
#include "common.cuh"

struct Part {
    void* data;
    long long start;
    long long count;
};

// Copies one value times a factor.
template <class A>
struct Scaled {
    A scale;
    template <class X, class Y>
    __device__ __forceinline__ void operator()(X x, Y* y) const {
        narrow(multiply_rounded(widen(x), scale), y);
    }
};

// Copies one value unchanged.
struct Unscaled {
    template <class X>
    __device__ __forceinline__ void operator()(X x, X* y) const {
        *y = x;
    }
};

template <bool IS_PACK, class Tensor, class Flat, class F>
__device__ __forceinline__ void copy(const Part* parts, Flat* flat, F f) {
    const Part part = parts[blockIdx.x];
    Tensor* tensor = (Tensor*)part.data;
    // Without this each access determines the address space at run time.
#if defined(__HIP__)
    __builtin_assume(!__builtin_amdgcn_is_shared(tensor) && !__builtin_amdgcn_is_private(tensor));
#elif !defined(MPIDIST_HOST)
    __builtin_assume(__isGlobal(tensor));
#endif
    flat += part.start;
    if constexpr (IS_PACK) transform<false>(tensor, flat, (int)part.count, f);
    else transform<false>(flat, tensor, (int)part.count, f);
}

#define PACK(Tensor, Flat)                                                                    \
    extern "C" __global__ void pack_##Tensor##_##Flat(const Part* parts, Flat* flat,          \
                                                      typename Compute<Flat>::type scale) {   \
        copy<true, Tensor>(parts, flat, Scaled<typename Compute<Flat>::type>{scale});         \
    }                                                                                         \
    extern "C" __global__ void unpack_##Tensor##_##Flat(const Part* parts, Flat* flat,        \
                                                        typename Compute<Flat>::type scale) { \
        copy<false, Tensor>(parts, flat, Scaled<typename Compute<Flat>::type>{scale});        \
    }

PACK(float, float)
PACK(float, float16)
PACK(float, bfloat16)
PACK(float16, float)
PACK(float16, float16)
PACK(float16, bfloat16)
PACK(bfloat16, float)
PACK(bfloat16, float16)
PACK(bfloat16, bfloat16)
PACK(double, double)

// Other types are copied as bytes and never scaled.
struct byte {
    unsigned char bits;
};

extern "C" __global__ void pack_byte_byte(const Part* parts, byte* flat, float) {
    copy<true, byte>(parts, flat, Unscaled{});
}
extern "C" __global__ void unpack_byte_byte(const Part* parts, byte* flat, float) {
    copy<false, byte>(parts, flat, Unscaled{});
}

// Many tensors into one flat buffer, and back, in one launch: value * scale, rounded once to the target's type.
//
// A table describes the chunks, one for each block: the address of its elements in a tensor, its place in the flat buffer, their
// number. One load brings a block to its first element.
#include "common.cuh"

struct Part {
    void* data;
    long long start;
    long long count;
};

// One value from here to there.
template <class A> struct Scaled {
    A scale;
    template <class X, class Y> __device__ __forceinline__ void operator()(X x, Y* y) const {
        narrow(multiply_rounded(widen(x), scale), y);
    }
};

struct AsItIs {
    template <class X> __device__ __forceinline__ void operator()(X x, X* y) const { *y = x; }
};

template <bool IS_PACK, class Tensor, class Flat, class F>
__device__ __forceinline__ void copy(const Part* parts, Flat* flat, F f) {
    const Part part = parts[blockIdx.x];
    Tensor* tensor = (Tensor*)part.data;
#ifndef MPIDIST_HOST
    __builtin_assume(__isGlobal(tensor));  // else each access asks which memory the address is of
#endif
    flat += part.start;
    if constexpr (IS_PACK) transform<false>(tensor, flat, (int)part.count, f);
    else transform<false>(flat, tensor, (int)part.count, f);
}

#define PACK(Tensor, Flat)                                                                                                    \
    extern "C" __global__ void pack_##Tensor##_##Flat(const Part* parts, Flat* flat,                                          \
                                                      typename Compute<Flat>::type scale) {                                   \
        copy<true, Tensor>(parts, flat, Scaled<typename Compute<Flat>::type>{scale});                                         \
    }                                                                                                                         \
    extern "C" __global__ void unpack_##Tensor##_##Flat(const Part* parts, Flat* flat,                                        \
                                                        typename Compute<Flat>::type scale) {                                 \
        copy<false, Tensor>(parts, flat, Scaled<typename Compute<Flat>::type>{scale});                                        \
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

// Any other type moves as bytes; there is nothing to scale.
struct byte { unsigned char bits; };

extern "C" __global__ void pack_byte_byte(const Part* parts, byte* flat, float) {
    copy<true, byte>(parts, flat, AsItIs{});
}
extern "C" __global__ void unpack_byte_byte(const Part* parts, byte* flat, float) {
    copy<false, byte>(parts, flat, AsItIs{});
}

// Many tensors into one flat buffer, and back, in one launch: value * scale, rounded once to the target's type.
//
// The tensors are told by a table: for each its address, its place in the flat buffer, its elements, and its first chunk. One block
// copies one chunk; `owners` names the tensor that a chunk belongs to.
#include "common.cuh"

struct Part {
    void* data;
    long long start;
    long long numel;
    long long first_chunk;
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
__device__ __forceinline__ void copy(const Part* parts, const int* owners, Flat* flat, F f) {
    constexpr int chunk = chunk_numel<Tensor, Flat>();
    const Part part = parts[owners[blockIdx.x]];
    const long long offset = (blockIdx.x - part.first_chunk) * chunk;
    const int count = part.numel - offset < chunk ? (int)(part.numel - offset) : chunk;
    Tensor* tensor = (Tensor*)part.data + offset;
    flat += part.start + offset;
    if constexpr (IS_PACK) transform<false>(tensor, flat, count, f);
    else transform<false>(flat, tensor, count, f);
}

#define PACK(Tensor, Flat)                                                                                                    \
    extern "C" __global__ void pack_##Tensor##_##Flat(const Part* parts, const int* owners, Flat* flat,                       \
                                                      typename Compute<Flat>::type scale) {                                   \
        copy<true, Tensor>(parts, owners, flat, Scaled<typename Compute<Flat>::type>{scale});                                 \
    }                                                                                                                         \
    extern "C" __global__ void unpack_##Tensor##_##Flat(const Part* parts, const int* owners, Flat* flat,                     \
                                                        typename Compute<Flat>::type scale) {                                 \
        copy<false, Tensor>(parts, owners, flat, Scaled<typename Compute<Flat>::type>{scale});                                \
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

extern "C" __global__ void pack_byte_byte(const Part* parts, const int* owners, byte* flat, float) {
    copy<true, byte>(parts, owners, flat, AsItIs{});
}
extern "C" __global__ void unpack_byte_byte(const Part* parts, const int* owners, byte* flat, float) {
    copy<false, byte>(parts, owners, flat, AsItIs{});
}

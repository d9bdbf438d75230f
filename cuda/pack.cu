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

template <bool IS_PACK, class Tensor, class Flat>
__device__ __forceinline__ void copy(const Part* parts, const int* owners, Flat* flat, typename Compute<Flat>::type scale) {
    constexpr int chunk = chunk_numel<Tensor, Flat>();
    const Part part = parts[owners[blockIdx.x]];
    const long long offset = (blockIdx.x - part.first_chunk) * chunk;
    const int count = part.numel - offset < chunk ? (int)(part.numel - offset) : chunk;
    Tensor* tensor = (Tensor*)part.data + offset;
    flat += part.start + offset;
    if constexpr (IS_PACK) {
        transform<false>(tensor, flat, count, [scale](Tensor x, Flat* y) { narrow(multiply_rounded(widen(x), scale), y); });
    } else {
        transform<false>(flat, tensor, count, [scale](Flat x, Tensor* y) { narrow(multiply_rounded(widen(x), scale), y); });
    }
}

#define PACK(Tensor, Flat)                                                                                                    \
    extern "C" __global__ void pack_##Tensor##_##Flat(const Part* parts, const int* owners, Flat* flat,                       \
                                                      typename Compute<Flat>::type scale) {                                   \
        copy<true, Tensor>(parts, owners, flat, scale);                                                                       \
    }                                                                                                                         \
    extern "C" __global__ void unpack_##Tensor##_##Flat(const Part* parts, const int* owners, Flat* flat,                     \
                                                        typename Compute<Flat>::type scale) {                                 \
        copy<false, Tensor>(parts, owners, flat, scale);                                                                      \
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

template <bool IS_PACK>
__device__ __forceinline__ void copy_bytes(const Part* parts, const int* owners, byte* flat) {
    constexpr int chunk = chunk_numel<byte, byte>();
    const Part part = parts[owners[blockIdx.x]];
    const long long offset = (blockIdx.x - part.first_chunk) * chunk;
    const int count = part.numel - offset < chunk ? (int)(part.numel - offset) : chunk;
    byte* tensor = (byte*)part.data + offset;
    flat += part.start + offset;
    const auto move = [](byte x, byte* y) { *y = x; };
    if constexpr (IS_PACK) transform<false>(tensor, flat, count, move);
    else transform<false>(flat, tensor, count, move);
}

extern "C" __global__ void pack_byte_byte(const Part* parts, const int* owners, byte* flat, float) {
    copy_bytes<true>(parts, owners, flat);
}
extern "C" __global__ void unpack_byte_byte(const Part* parts, const int* owners, byte* flat, float) {
    copy_bytes<false>(parts, owners, flat);
}

// CUDA on the CPU, for tests: the threads of a block are fibers that switch only at barriers and
// shuffles.
//
// A fiber runs until it must wait for others, in an order chosen by the test, so that a kernel that
// lacks a barrier gives another result in another order. A deadlock of fibers, and misaligned
// vectors (checked by the compiler), end the process.
//
// Blocks run one after another, so a missing fence between blocks is not noticed.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#define MPIDIST_HOST 1
#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace shim {
struct Index {
    unsigned x, y, z;
};

struct Fiber {
    ucontext_t start;
    jmp_buf at;
    std::vector<char> stack;
    bool has_begun, is_done;
    unsigned long long word;  // its value in a shuffle
};

constexpr int STACK_BYTES = 1 << 17;
inline std::vector<Fiber> fibers;
inline ucontext_t caller;
inline jmp_buf scheduler;
inline int current, alive;
inline bool has_moved;  // some fiber made progress in this round

// A barrier of some fibers.
struct Barrier {
    int arrived = 0;
    unsigned round = 0;
};
inline Barrier of_block, of_warps[64];
inline int alive_in_warp[64];
}  // namespace shim

inline shim::Index blockIdx, threadIdx, blockDim, gridDim;

namespace shim {
inline void yield() {
    if (!_setjmp(fibers[current].at)) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier, const int& expected) {
    const unsigned round = barrier.round;
    barrier.arrived++;
    has_moved = true;
    while (barrier.round == round && barrier.arrived < expected) yield();
    if (barrier.round == round) {
        barrier.arrived = 0;
        barrier.round++;
    }
    has_moved = true;
}

inline void wait_warp() { wait(of_warps[current / 32], alive_in_warp[current / 32]); }

template <class T>
T exchange(T value, int lane) {
    static_assert(sizeof(T) <= 8);
    memcpy(&fibers[current].word, &value, sizeof(T));
    wait_warp();
    T received;
    memcpy(&received, &fibers[current / 32 * 32 + lane % 32].word, sizeof(T));
    wait_warp();
    return received;
}

inline void (*body)(void*);
inline void* body_arguments;

inline void run_fiber() {
    body(body_arguments);
    Fiber& self = fibers[current];
    self.is_done = true;
    alive--;
    alive_in_warp[current / 32]--;
    has_moved = true;
    _longjmp(scheduler, 1);
}

// Uses only global state after a jump, because locals do not survive it.
inline void resume(int i) {
    current = i;
    threadIdx = {(unsigned)i, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fibers[i].has_begun) _longjmp(fibers[i].at, 1);
    fibers[i].has_begun = true;
    getcontext(&fibers[i].start);
    fibers[i].start.uc_stack.ss_sp = fibers[i].stack.data();
    fibers[i].start.uc_stack.ss_size = fibers[i].stack.size();
    fibers[i].start.uc_link = &caller;
    makecontext(&fibers[i].start, run_fiber, 0);
    setcontext(&fibers[i].start);
}

inline unsigned order_seed;

inline void run_block(unsigned block, unsigned threads) {
    blockIdx = {block, 0, 0};
    of_block = {};
    for (unsigned i = 0; i < threads; i++) fibers[i].has_begun = fibers[i].is_done = false;
    for (unsigned w = 0; w < (threads + 31) / 32; w++) {
        of_warps[w] = {};
        alive_in_warp[w] = threads - w * 32 < 32 ? threads - w * 32 : 32;
    }
    alive = threads;
    unsigned state = order_seed * 2654435761u + block;
    while (alive) {
        has_moved = false;
        // A step coprime to the number of threads visits each thread once.
        state = state * 1664525u + 1013904223u;
        unsigned step = order_seed ? (state >> 8) % threads | 1 : 1;
        while (std::gcd(step, threads) != 1) step += 2;
        for (unsigned k = 0, i = order_seed ? state % threads : 0; k < threads;
             k++, i = (i + step) % threads)
            if (!fibers[i].is_done) resume((int)i);
        if (!has_moved) {
            fprintf(stderr, "block %u: %d of %u threads wait for each other in vain\n", block,
                    alive, threads);
            abort();
        }
    }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_reference_t<A>*)arguments[I]...);
}

template <auto KERNEL>
struct Launcher;
template <class... A, void (*KERNEL)(A...)>
struct Launcher<KERNEL> {
    static void launch(unsigned blocks, unsigned threads, unsigned seed, void** arguments) {
        if (fibers.size() < threads) fibers.resize(threads);
        for (Fiber& fiber : fibers) fiber.stack.resize(STACK_BYTES);
        gridDim = {blocks, 1, 1};
        blockDim = {threads, 1, 1};
        order_seed = seed;
        body = [](void* a) { call(KERNEL, (void**)a, std::index_sequence_for<A...>()); };
        body_arguments = arguments;
        for (unsigned block = 0; block < blocks; block++) run_block(block, threads);
    }
};
}  // namespace shim

inline void __syncthreads() { shim::wait(shim::of_block, shim::alive); }
inline void __threadfence() {}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return shim::exchange(value, (shim::current % 32) ^ mask);
}
// HIP's shuffle on a wavefront of 64 lanes, of which width take part. The other half may have left
// the branch, as AMD's devices allow, so lanes wait for their own 32 alone, and may read no others.
template <class T>
T __shfl_xor(T value, int mask, int width) {
    const int lane = shim::current % 64, other = lane ^ mask;
    if (other / width != lane / width || other / 32 != lane / 32) {
        fprintf(stderr, "lane %d reads lane %d of a wavefront, in groups of %d\n", lane, other, width);
        abort();
    }
    return shim::exchange(value, other % 32);
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
inline int atomicAdd(int* p, int v) {
    const int old = *p;
    *p += v;
    return old;
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline unsigned __float_as_uint(float v) {
    unsigned bits;
    memcpy(&bits, &v, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

// IEEE 754 binary16 by arithmetic, because not every compiler has the type.
inline float half_to_float(unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent == 31 ? (fraction ? NAN : INFINITY)
                            : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                           : std::ldexp((float)fraction, -24);
    return bits & 0x8000 ? -magnitude : magnitude;
}

inline unsigned short float_to_half(float value) {
    const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
    const float magnitude = std::fabs(value);
    if (value != value) return 0x7e00;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude < std::ldexp(1.0f, -14))
        return sign | (unsigned short)std::nearbyint(std::ldexp(magnitude, 24));
    int exponent;
    std::frexp(magnitude, &exponent);
    const int fraction = (int)std::nearbyint(std::ldexp(magnitude, 11 - exponent));  // 1024 .. 2048
    return sign | (unsigned short)(((exponent + 14) << 10) + fraction - 1024);
}

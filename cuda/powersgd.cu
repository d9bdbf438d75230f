// PowerSGD over all matrices of a bucket, one launch a stage.
//
// Letters: X (rows × columns, row by row) is M * scale + E; P (rows × r) and Q (columns × r) lie column by column; r <= RANK.
//   project        M = X, P = X * Q        (without E nothing but P is written)
//   orthogonalize  the columns of P, or of Q, become orthonormal
//   backproject    Q = X^T * P
//   reconstruct    E = X - P * Q^T, M = P * Q^T
// E stays as it was until reconstruct: a step whose sums turn out not to be finite is given up before.
// A table tells of each item its addresses and sizes, and its first block in each stage; `owners` names the item of a block. An item
// of rank 0 is a tensor that travels whole: `project` copies it to P, `reconstruct` copies it back.
#include "common.cuh"

#ifndef RANK
#define RANK 4  // the highest r of the bucket, rounded up to a power of two, at most 32; the compiler's option sets it
#endif

struct Item {
    void* m;
    void* e;  // null without error feedback
    void* p;
    void* q;
    long long rows;
    long long columns;
    long long rank;
    long long row_block;     // its first block in project and reconstruct
    long long column_block;  // its first block in backproject
    long long splits;        // blocks that share one strip of columns in backproject
    long long partials;      // where their sums begin, in elements
    long long counters;      // where the counts of their arrivals begin
};

#ifndef SWEEP_THREADS
#define SWEEP_THREADS 512  // of the block that orthogonalises a matrix; set with RANK
#endif

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int ROWS = RANK <= 8 ? 4 : 32 / RANK;   // rows that a warp takes at once, so that each element of Q serves several
constexpr int COLUMNS = RANK <= 8 ? 4 : 32 / RANK;  // columns of a thread in backproject
constexpr int WIDTH = WARP * COLUMNS;               // of a strip
constexpr int TILE = 128;                           // rows of P in shared memory
constexpr int BATCH = 4;                            // rows in flight in each warp of backproject
constexpr int MAX_WARPS = 32;

__device__ __forceinline__ float root(float v) { return sqrtf(v); }
__device__ __forceinline__ double root(double v) { return sqrt(v); }

// Sum COUNT values (a power of two) over the lanes, halving what each lane holds: lane l ends with value l * COUNT / 32 in v[0].
template <int COUNT, int OFFSET, class A> __device__ __forceinline__ void sum_over_warp(A* v) {
    if constexpr (OFFSET > 0) {
        if constexpr (COUNT > 1) {
            const bool is_upper = threadIdx.x & OFFSET;
#pragma unroll
            for (int i = 0; i < COUNT / 2; i++) {
                const A given = is_upper ? v[i] : v[i + COUNT / 2];
                const A kept = is_upper ? v[i + COUNT / 2] : v[i];
                v[i] = kept + __shfl_xor_sync(ALL_LANES, given, OFFSET);
            }
            sum_over_warp<COUNT / 2, OFFSET / 2>(v);
        } else {
            v[0] += __shfl_xor_sync(ALL_LANES, v[0], OFFSET);
            sum_over_warp<1, OFFSET / 2>(v);
        }
    }
}

// The elements of a tensor that travels whole which are this block's, as the start and their number.
template <class T> __device__ __forceinline__ int whole_chunk(const Item& item, long long& start) {
    constexpr int chunk = chunk_numel<T, T>();
    start = (blockIdx.x - item.row_block) * chunk;
    return item.rows - start < chunk ? (int)(item.rows - start) : chunk;
}

template <int N, class T> __device__ __forceinline__ bool takes_vectors(const Item& item) {
    return item.columns % N == 0 && is_aligned<N>((const T*)item.m) && is_aligned<N>((const T*)item.e) &&
           is_aligned<N>((const T*)item.q);
}

template <class T, int N> __device__ __forceinline__ void project_rows(const Item& item, long long row, typename Compute<T>::type scale) {
    using A = typename Compute<T>::type;
    const int lane = threadIdx.x % WARP, rank = (int)item.rank;
    const long long columns = item.columns;
    const int rows = item.rows - row < ROWS ? (int)(item.rows - row) : ROWS;
    T* m = (T*)item.m + row * columns;
    const T* e = item.e ? (const T*)item.e + row * columns : nullptr;
    const T* q = (const T*)item.q;
    A sums[ROWS * RANK] = {};
    for (long long c = lane * N; c < columns; c += WARP * N) {
        Vector<T, N> in[ROWS], left_out[ROWS];
        A x[ROWS][N];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i >= rows) continue;
            in[i] = load<N, true>(m + i * columns + c);
            if (e) left_out[i] = load<N, true>(e + i * columns + c);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                x[i][k] = 0;
                if (i >= rows) continue;
                x[i][k] = multiply_rounded(widen(in[i].at[k]), scale);
                if (e) {  // the later stages see X as it is stored
                    narrow(add_rounded(widen(left_out[i].at[k]), x[i][k]), &in[i].at[k]);
                    x[i][k] = widen(in[i].at[k]);
                }
            }
            if (e && i < rows) *(Vector<T, N>*)(m + i * columns + c) = in[i];
        }
#pragma unroll
        for (int r = 0; r < RANK; r++) {
            if (r >= rank) continue;
            const Vector<T, N> right = load<N, true>(q + r * columns + c);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int k = 0; k < N; k++) sums[i * RANK + r] += x[i][k] * widen(right.at[k]);
        }
    }
    constexpr int COUNT = ROWS * RANK;
    sum_over_warp<COUNT, WARP / 2>(sums);
    const int value = lane * COUNT / WARP, i = value / RANK, r = value % RANK;
    if (lane % (WARP / COUNT) == 0 && i < rows && r < rank) narrow(sums[0], (T*)item.p + r * item.rows + row + i);
}

template <class T> __device__ __forceinline__ void project(const Item* items, const int* owners, typename Compute<T>::type scale) {
    constexpr int N = 16 / sizeof(T) < 4 ? 16 / sizeof(T) : 4;
    const Item item = items[owners[blockIdx.x]];
    if (item.rank == 0) {
        long long start;
        const int count = whole_chunk<T>(item, start);
        transform<false>((const T*)item.m + start, (T*)item.p + start, count,
                         [scale](T x, T* y) { narrow(multiply_rounded(widen(x), scale), y); });
        return;
    }
    const long long warp = (blockIdx.x - item.row_block) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (warp * ROWS >= item.rows) return;
    if (takes_vectors<N, T>(item)) project_rows<T, N>(item, warp * ROWS, scale);
    else project_rows<T, 1>(item, warp * ROWS, scale);
}

template <class T, int N> __device__ __forceinline__ void reconstruct_rows(const Item& item, long long row) {
    using A = typename Compute<T>::type;
    const int lane = threadIdx.x % WARP, rank = (int)item.rank;
    const long long columns = item.columns;
    const int rows = item.rows - row < ROWS ? (int)(item.rows - row) : ROWS;
    T* m = (T*)item.m + row * columns;
    T* e = item.e ? (T*)item.e + row * columns : nullptr;
    const T* q = (const T*)item.q;
    A left[ROWS][RANK];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int r = 0; r < RANK; r++)
            left[i][r] = i < rows && r < rank ? widen(((const T*)item.p)[r * item.rows + row + i]) : A(0);
    for (long long c = lane * N; c < columns; c += WARP * N) {
        Vector<T, N> x[ROWS];
        A products[ROWS][N] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (e && i < rows) x[i] = load<N, true>(m + i * columns + c);
#pragma unroll
        for (int r = 0; r < RANK; r++) {
            if (r >= rank) continue;
            const Vector<T, N> right = load<N, true>(q + r * columns + c);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int k = 0; k < N; k++) products[i][k] += left[i][r] * widen(right.at[k]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i >= rows) continue;
            Vector<T, N> approximation;
#pragma unroll
            for (int k = 0; k < N; k++) {
                narrow(products[i][k], &approximation.at[k]);
                if (e) narrow(add_rounded(widen(x[i].at[k]), -widen(approximation.at[k])), &x[i].at[k]);
            }
            *(Vector<T, N>*)(m + i * columns + c) = approximation;
            if (e) *(Vector<T, N>*)(e + i * columns + c) = x[i];
        }
    }
}

template <class T> __device__ __forceinline__ void reconstruct(const Item* items, const int* owners) {
    constexpr int N = 16 / sizeof(T) < 4 ? 16 / sizeof(T) : 4;
    const Item item = items[owners[blockIdx.x]];
    if (item.rank == 0) {
        long long start;
        const int count = whole_chunk<T>(item, start);
        transform<false>((const T*)item.p + start, (T*)item.m + start, count, [](T x, T* y) { *y = x; });
        return;
    }
    const long long warp = (blockIdx.x - item.row_block) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (warp * ROWS >= item.rows) return;
    if (takes_vectors<N, T>(item)) reconstruct_rows<T, N>(item, warp * ROWS);
    else reconstruct_rows<T, 1>(item, warp * ROWS);
}

// Where a thread's k-th column lies in its strip: side by side if they are read at once, else side by side over the lanes.
template <bool IS_VECTOR> __device__ __forceinline__ int column_of(int lane, int k) {
    return IS_VECTOR ? lane * COLUMNS + k : lane + k * WARP;
}

template <class T, bool IS_VECTOR>
__device__ __forceinline__ void multiply_strip(const Item& item, long long strip, long long split, typename Compute<T>::type scale,
                                               typename Compute<T>::type* left, typename Compute<T>::type (&sums)[COLUMNS * RANK]) {
    using A = typename Compute<T>::type;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, rank = (int)item.rank;
    const T* x = (const T*)item.m;
    const A factor = item.e ? A(1) : scale;  // M holds X already
    const long long columns = item.columns, tiles = (item.rows + TILE - 1) / TILE;
    for (long long tile = split; tile < tiles; tile += item.splits) {
        const long long top = tile * TILE;
        const int rows = item.rows - top < TILE ? (int)(item.rows - top) : TILE;
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * RANK; i += blockDim.x) {
            const int row = i % TILE, r = i / TILE;
            left[row * RANK + r] = row < rows && r < rank ? widen(((const T*)item.p)[r * item.rows + top + row]) : A(0);
        }
        __syncthreads();
        for (int first = warp; first < rows; first += warps * BATCH) {
            Vector<T, COLUMNS> in[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int row = first + b * warps;
                const long long start = (top + row) * columns + strip * WIDTH;
#pragma unroll
                for (int k = 0; k < COLUMNS; k++) {
                    if constexpr (IS_VECTOR) {
                        if (k == 0 && row < rows && strip * WIDTH + lane * COLUMNS < columns)
                            in[b] = load<COLUMNS, true>(x + start + lane * COLUMNS);
                    } else {
                        if (row < rows && strip * WIDTH + column_of<false>(lane, k) < columns)
                            in[b].at[k] = x[start + column_of<false>(lane, k)];
                    }
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int row = first + b * warps;
                if (row >= rows) continue;
#pragma unroll
                for (int k = 0; k < COLUMNS; k++) {
                    if (strip * WIDTH + column_of<IS_VECTOR>(lane, k) >= columns) continue;
                    const A value = multiply_rounded(widen(in[b].at[k]), factor);
#pragma unroll
                    for (int r = 0; r < RANK; r++) sums[k * RANK + r] += value * left[row * RANK + r];
                }
            }
        }
    }
}

// Sum over the warps, and over the blocks that share a strip: the last to arrive adds up all, in a fixed order, so that the result
// does not depend on who was last.
template <class T, bool IS_VECTOR>
__device__ __forceinline__ void write_strip(const Item& item, long long strip, long long split, typename Compute<T>::type* space,
                                            typename Compute<T>::type (&sums)[COLUMNS * RANK], typename Compute<T>::type* partials,
                                            int* counters) {
    using A = typename Compute<T>::type;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, rank = (int)item.rank;
    T* q = (T*)item.q + strip * WIDTH;
    const long long left_over = item.columns - strip * WIDTH;
    const int width = left_over < WIDTH ? (int)left_over : WIDTH;
    A* of_strip = partials + item.partials + strip * item.splits * RANK * WIDTH;
#pragma unroll
    for (int r = 0; r < RANK; r++) {
        if (r >= rank) continue;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) space[warp * WIDTH + column_of<IS_VECTOR>(lane, k)] = sums[k * RANK + r];
        __syncthreads();
        for (int c = threadIdx.x; c < width; c += blockDim.x) {
            A total = 0;
            for (int w = 0; w < warps; w++) total += space[w * WIDTH + c];
            if (item.splits == 1) narrow(total, q + r * item.columns + c);
            else of_strip[(split * RANK + r) * WIDTH + c] = total;
        }
    }
    if (item.splits == 1) return;
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    int* counter = counters + item.counters + strip;
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) == item.splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < rank * WIDTH; i += blockDim.x) {
        const int r = i / WIDTH, c = i % WIDTH;
        if (c >= width) continue;
        A total = 0;
        for (long long s = 0; s < item.splits; s++) total += __ldcg(of_strip + (s * RANK + r) * WIDTH + c);
        narrow(total, q + r * item.columns + c);
    }
    if (threadIdx.x == 0) *counter = 0;  // ready for the next launch
}

template <class T, bool IS_VECTOR>
__device__ __forceinline__ void backproject_strip(const Item& item, typename Compute<T>::type scale, typename Compute<T>::type* space,
                                                  typename Compute<T>::type* partials, int* counters) {
    const long long block = blockIdx.x - item.column_block, strip = block / item.splits, split = block % item.splits;
    typename Compute<T>::type sums[COLUMNS * RANK] = {};
    multiply_strip<T, IS_VECTOR>(item, strip, split, scale, space, sums);
    write_strip<T, IS_VECTOR>(item, strip, split, space, sums, partials, counters);
}

template <class T>
__device__ __forceinline__ void backproject(const Item* items, const int* owners, typename Compute<T>::type scale,
                                            typename Compute<T>::type* partials, int* counters) {
    using A = typename Compute<T>::type;
    constexpr int MOST_WARPS = 8;
    __shared__ A space[TILE * RANK > MOST_WARPS * WIDTH ? TILE * RANK : MOST_WARPS * WIDTH];
    const Item item = items[owners[blockIdx.x]];
    const bool is_vector = item.columns % COLUMNS == 0 && is_aligned<COLUMNS>((const T*)item.m);
    if (is_vector) backproject_strip<T, true>(item, scale, space, partials, counters);
    else backproject_strip<T, false>(item, scale, space, partials, counters);
}

// Modified Gram-Schmidt, twice: the second sweep removes what rounding left of one column in another. One block a matrix; a thread
// keeps to its rows, so only the sums cross threads. A column of zeros stays one.
template <class T> __device__ __forceinline__ void orthogonalize(T* v, long long n, int rank, typename Compute<T>::type epsilon) {
    using A = typename Compute<T>::type;
    __shared__ A of_warps[MAX_WARPS * RANK];
    __shared__ A totals[RANK];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (int step = 0; step < 2 * rank; step++) {
        const int i = step % rank;
        A dots[RANK] = {};  // of column i with itself and those behind it
        for (long long row = threadIdx.x; row < n; row += blockDim.x) {
            const A own = widen(v[i * n + row]);
#pragma unroll
            for (int j = 0; j < RANK; j++)
                if (j >= i && j < rank) dots[j] += own * widen(v[j * n + row]);
        }
        sum_over_warp<RANK, WARP / 2>(dots);
        __syncthreads();
        if (lane % (WARP / RANK) == 0) of_warps[warp * RANK + lane * RANK / WARP] = dots[0];
        __syncthreads();
        if (threadIdx.x < RANK) {
            A total = 0;
            for (int w = 0; w < warps; w++) total += of_warps[w * RANK + threadIdx.x];
            totals[threadIdx.x] = total;
        }
        __syncthreads();
        const A norm = root(totals[i]) + epsilon;
        const A inverse = norm == 0 ? A(0) : 1 / norm;
        for (long long row = threadIdx.x; row < n; row += blockDim.x) {
            const A own = widen(v[i * n + row]) * inverse;
            narrow(own, v + i * n + row);
            for (int j = i + 1; j < rank; j++) narrow(widen(v[j * n + row]) - own * (totals[j] * inverse), v + j * n + row);
        }
    }
}

#define POWERSGD(T)                                                                                                           \
    extern "C" __global__ void project_##T(const Item* items, const int* owners, typename Compute<T>::type scale) {           \
        project<T>(items, owners, scale);                                                                                     \
    }                                                                                                                         \
    extern "C" __global__ void backproject_##T(const Item* items, const int* owners, typename Compute<T>::type scale,         \
                                               typename Compute<T>::type* partials, int* counters) {                          \
        backproject<T>(items, owners, scale, partials, counters);                                                             \
    }                                                                                                                         \
    extern "C" __global__ void reconstruct_##T(const Item* items, const int* owners) { reconstruct<T>(items, owners); }       \
    extern "C" __global__ void __launch_bounds__(SWEEP_THREADS)                                                               \
        orthogonalize_##T(const Item* items, int is_q, typename Compute<T>::type epsilon) {                                   \
        const Item item = items[blockIdx.x];                                                                                  \
        if (item.rank == 0) return;                                                                                           \
        orthogonalize<T>((T*)(is_q ? item.q : item.p), is_q ? item.columns : item.rows, (int)item.rank, epsilon);             \
    }

POWERSGD(float)
POWERSGD(double)
POWERSGD(float16)
POWERSGD(bfloat16)

// PowerSGD on all matrices of a bucket, with one launch for each stage.
//
// Letters: X (rows × columns, row by row) is M * scale + E; P (rows × r) and Q (columns × r) lie
// column by column; r <= RANK.
//   project        M = X, P = X * Q        (without E only P is written)
//   orthogonalize  makes the columns of P, or of Q, orthonormal
//   normalize      completes orthogonalize for tall matrices
//   backproject    Q = X^T * P
//   reconstruct    E = X - P * Q^T, M = P * Q^T
// E is unchanged until reconstruct, because a step whose sums are not finite is given up before.
// A table has the addresses, sizes and first blocks of each item; `owners` is the item of each
// block. An item of rank 0 is a tensor that is not compressed: `project` copies it to P,
// `reconstruct` copies it back. kernels/powersgd_plan.py writes the tables and uses the same
// constants.
#include "common.cuh"

// The highest r of the bucket, rounded up to a power of two, at most 32; a compiler option sets it.
#ifndef RANK
#define RANK 4
#endif

// Blocks that orthogonalize P or Q.
struct Sweep {
    long long block;    // the first one, in orthogonalize and normalize
    long long blocks;   // 1: the block holds all rows in registers; else the matrix is tall
    long long segment;  // rows of a block
    // First element of the blocks' Gram matrices; the inverse factor replaces the first of them.
    long long gram;
    long long counter;  // counts the blocks that have arrived
};

struct Item {
    void* m;
    void* e;  // null without error feedback
    void* p;
    void* q;
    long long rows;
    long long columns;
    long long rank;
    long long row_block;  // first block in project and reconstruct
    // In project and reconstruct: the warps of a block share ROWS rows and divide the columns; else
    // each warp has ROWS rows of its own.
    long long shares_rows;
    long long column_block;  // first block in backproject
    long long splits;        // blocks that share one strip of columns in backproject
    long long partials;      // first element of their sums
    long long counters;      // first counter of their arrivals
    Sweep sweeps[2];         // of P, of Q
};

// Rows that a warp processes at once, so that each element of Q is used for several.
constexpr int ROWS = RANK <= 8 ? 4 : 32 / RANK;
constexpr int COLUMNS = RANK <= 8 ? 4 : 32 / RANK;  // columns of a thread in backproject
constexpr int WIDTH = WARP * COLUMNS;               // of a strip
constexpr int TILE = 128;                           // rows of P in shared memory
constexpr int BATCH = 4;                            // rows in flight in each warp of backproject
constexpr int MAX_WARPS = 8;  // of a block, except in orthogonalize, normalize
constexpr int SWEEP_THREADS = 512;
constexpr int SWEEP_WARPS = SWEEP_THREADS / WARP;
// Limits on the rows that one thread keeps in registers in orthogonalize and normalize.
constexpr int HELD_BYTES = 256;
constexpr int MAX_HELD = 16;  // rows

__device__ __forceinline__ float root(float v) { return sqrtf(v); }
__device__ __forceinline__ double root(double v) { return sqrt(v); }

// Sums COUNT values (a power of two) over the lanes. Each step halves the number of values in a
// lane; lane l ends with value l * COUNT / 32 in v[0].
template <int COUNT, int OFFSET, class A>
__device__ __forceinline__ void sum_over_warp(A* v) {
    if constexpr (OFFSET > 0) {
        if constexpr (COUNT > 1) {
            const bool is_upper = threadIdx.x & OFFSET;
#pragma unroll
            for (int i = 0; i < COUNT / 2; i++) {
                const A sent = is_upper ? v[i] : v[i + COUNT / 2];
                const A kept = is_upper ? v[i + COUNT / 2] : v[i];
                v[i] = kept + of_lane_xor(sent, OFFSET);
            }
            sum_over_warp<COUNT / 2, OFFSET / 2>(v);
        } else {
            v[0] += of_lane_xor(v[0], OFFSET);
            sum_over_warp<1, OFFSET / 2>(v);
        }
    }
}

// This block's elements of a tensor that is not compressed: sets their start, returns their number.
template <class T>
__device__ __forceinline__ int whole_chunk(const Item& item, long long& start) {
    constexpr int chunk = chunk_numel<T, T>();
    start = (blockIdx.x - item.row_block) * chunk;
    return item.rows - start < chunk ? (int)(item.rows - start) : chunk;
}

template <int N>
struct Width {
    static constexpr int value = N;
};

// Calls f(Width<n>()) for the largest n such that all of these addresses and sizes in bytes are
// aligned to n elements: N, those of 8 bytes, or 1. High ranks skip 8 bytes to halve the compile
// time.
template <int N, class T, class F>
__device__ __forceinline__ void by_width(unsigned long long places, F f) {
    if constexpr (N == 1) f(Width<1>());
    else if (places % (N * sizeof(T)) == 0) f(Width<N>());
    else by_width<(N * sizeof(T) > 8 && RANK <= 8 ? N / 2 : 1), T>(places, f);
}

template <class T>
__device__ __forceinline__ unsigned long long places_of(const Item& item) {
    return (unsigned long long)item.m | (unsigned long long)item.e | (unsigned long long)item.q |
           item.columns * sizeof(T);
}

// Returns the first of the ROWS rows of a warp in project and reconstruct; the warp processes their
// vectors from `first` in steps of `step`.
__device__ __forceinline__ long long rows_of_warp(const Item& item, int& first, int& step) {
    const long long block = blockIdx.x - item.row_block;
    first = item.shares_rows ? threadIdx.x : threadIdx.x % WARP;
    step = item.shares_rows ? blockDim.x : WARP;
    return (item.shares_rows ? block : block * (blockDim.x / WARP) + threadIdx.x / WARP) * ROWS;
}

template <class T, int N>
__device__ __forceinline__ void project_rows(const Item& item, long long row, int first, int step,
                                             typename Compute<T>::type scale,
                                             typename Compute<T>::type* space) {
    using A = typename Compute<T>::type;
    const int lane = threadIdx.x % WARP, rank = (int)item.rank;
    const long long columns = item.columns;
    const int rows = item.rows - row < ROWS ? (int)(item.rows - row) : ROWS;
    T* m = (T*)item.m + row * columns;
    const T* e = item.e ? (const T*)item.e + row * columns : nullptr;
    const T* q = (const T*)item.q;
    // Columns of Q that are read together; the first ones together with M and E.
    constexpr int AHEAD = RANK <= 4 ? RANK : 2;
    A sums[ROWS * RANK] = {};
    for (long long c = first * N; c < columns; c += step * N) {
        Vector<T, N> in[ROWS], left_out[ROWS], right[AHEAD];
        A x[ROWS][N];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i >= rows) continue;
            in[i] = load<N, true>(m + i * columns + c);
            if (e) left_out[i] = load<N, true>(e + i * columns + c);
        }
#pragma unroll
        for (int start = 0; start < RANK; start += AHEAD) {
#pragma unroll
            for (int r = 0; r < AHEAD; r++)
                if (start + r < rank) right[r] = load<N, true>(q + (start + r) * columns + c);
#pragma unroll
            for (int i = 0; i < ROWS && start == 0; i++) {
#pragma unroll
                for (int k = 0; k < N; k++) {
                    x[i][k] = 0;
                    if (i >= rows) continue;
                    x[i][k] = multiply_rounded(widen(in[i].at[k]), scale);
                    // The later stages read X as it is stored, so it is rounded here too.
                    if (e) {
                        narrow(add_rounded(widen(left_out[i].at[k]), x[i][k]), &in[i].at[k]);
                        x[i][k] = widen(in[i].at[k]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < AHEAD; r++) {
                if (start + r >= rank) continue;
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int k = 0; k < N; k++)
                        sums[i * RANK + start + r] += x[i][k] * widen(right[r].at[k]);
            }
        }
        // The stores are last, so that no read of Q waits for them.
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (e && i < rows) store<N>(m + i * columns + c, in[i]);
    }
    constexpr int COUNT = ROWS * RANK;
    sum_over_warp<COUNT, WARP / 2>(sums);
    int value = lane * COUNT / WARP;
    bool is_mine = lane % (WARP / COUNT) == 0;
    if (item.shares_rows) {
        if (is_mine) space[threadIdx.x / WARP * COUNT + value] = sums[0];
        __syncthreads();
        value = threadIdx.x;
        is_mine = value < COUNT;
        sums[0] = 0;
        for (int w = 0; is_mine && w < blockDim.x / WARP; w++) sums[0] += space[w * COUNT + value];
    }
    const int i = value / RANK, r = value % RANK;
    if (is_mine && i < rows && r < rank) narrow(sums[0], (T*)item.p + r * item.rows + row + i);
}

template <class T>
__device__ __forceinline__ void project(const Item* items, const int* owners,
                                        typename Compute<T>::type scale) {
    constexpr int N = 16 / sizeof(T) < 4 ? 16 / sizeof(T) : 4;
    __shared__ typename Compute<T>::type space[MAX_WARPS * ROWS * RANK];
    const Item item = items[owners[blockIdx.x]];
    if (item.rank == 0) {
        long long start;
        const int count = whole_chunk<T>(item, start);
        transform<false>((const T*)item.m + start, (T*)item.p + start, count,
                         [scale](T x, T* y) { narrow(multiply_rounded(widen(x), scale), y); });
        return;
    }
    int first, step;
    const long long row = rows_of_warp(item, first, step);
    // If warps share rows, this holds for all warps of the block, so no barrier is left waiting.
    if (row >= item.rows) return;
    by_width<N, T>(places_of<T>(item), [&](auto width) {
        project_rows<T, decltype(width)::value>(item, row, first, step, scale, space);
    });
}

template <class T, int N>
__device__ __forceinline__ void reconstruct_rows(const Item& item, long long row, int first,
                                                 int step) {
    using A = typename Compute<T>::type;
    const int rank = (int)item.rank;
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
            left[i][r] =
                i < rows && r < rank ? widen(((const T*)item.p)[r * item.rows + row + i]) : A(0);
    for (long long c = first * N; c < columns; c += step * N) {
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
                if (e)
                    narrow(subtract_rounded(widen(x[i].at[k]), widen(approximation.at[k])),
                           &x[i].at[k]);
            }
            store<N>(m + i * columns + c, approximation);
            if (e) store<N>(e + i * columns + c, x[i]);
        }
    }
}

template <class T>
__device__ __forceinline__ void reconstruct(const Item* items, const int* owners) {
    constexpr int N = 16 / sizeof(T) < 4 ? 16 / sizeof(T) : 4;
    const Item item = items[owners[blockIdx.x]];
    if (item.rank == 0) {
        long long start;
        const int count = whole_chunk<T>(item, start);
        transform<false>((const T*)item.p + start, (T*)item.m + start, count,
                         [](T x, T* y) { *y = x; });
        return;
    }
    int first, step;
    const long long row = rows_of_warp(item, first, step);
    if (row >= item.rows) return;
    by_width<N, T>(places_of<T>(item), [&](auto width) {
        reconstruct_rows<T, decltype(width)::value>(item, row, first, step);
    });
}

// Position in the strip of a thread's k-th column: N adjacent columns are read at once, and
// adjacent lanes read adjacent groups of N.
template <int N>
__device__ __forceinline__ int column_of(int lane, int k) {
    return (k / N * WARP + lane) * N + k % N;
}

template <class T, int N>
__device__ __forceinline__ void multiply_strip(const Item& item, long long strip, long long split,
                                               typename Compute<T>::type scale,
                                               typename Compute<T>::type* left,
                                               typename Compute<T>::type (&sums)[COLUMNS * RANK]) {
    using A = typename Compute<T>::type;
    // Elements of a row of P that are read at once.
    constexpr int AT_ONCE = RANK < 16 / (int)sizeof(A) ? RANK : 16 / (int)sizeof(A);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP,
              rank = (int)item.rank;
    const T* x = (const T*)item.m + strip * WIDTH;
    const A factor = item.e ? A(1) : scale;  // M holds X
    const long long columns = item.columns, tiles = (item.rows + TILE - 1) / TILE;
    bool has[COLUMNS / N];  // vectors of this thread that lie in the matrix
#pragma unroll
    for (int j = 0; j < COLUMNS / N; j++)
        has[j] = strip * WIDTH + column_of<N>(lane, j * N) < columns;
    for (long long tile = split; tile < tiles; tile += item.splits) {
        const long long top = tile * TILE;
        const int rows = item.rows - top < TILE ? (int)(item.rows - top) : TILE;
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * RANK; i += blockDim.x) {
            const int row = i % TILE, r = i / TILE;
            left[row * RANK + r] = row < rows && r < rank
                                       ? widen(((const T*)item.p)[r * item.rows + top + row])
                                       : A(0);
        }
        __syncthreads();
        for (int first = warp; first < rows; first += warps * BATCH) {
            Vector<T, N> in[BATCH][COLUMNS / N] = {};
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int row = first + b * warps;
#pragma unroll
                for (int j = 0; j < COLUMNS / N; j++)
                    if (row < rows && has[j])
                        in[b][j] =
                            load<N, true>(x + (top + row) * columns + column_of<N>(lane, j * N));
            }
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int row = first + b * warps;
                if (row >= rows) continue;
                Vector<A, AT_ONCE> p[RANK / AT_ONCE];
#pragma unroll
                for (int i = 0; i < RANK / AT_ONCE; i++)
                    p[i] = load<AT_ONCE, true>(left + row * RANK + i * AT_ONCE);
#pragma unroll
                for (int k = 0; k < COLUMNS; k++) {  // zeros beyond the matrix
                    const A value = multiply_rounded(widen(in[b][k / N].at[k % N]), factor);
#pragma unroll
                    for (int r = 0; r < RANK; r++)
                        sums[k * RANK + r] += value * p[r / AT_ONCE].at[r % AT_ONCE];
                }
            }
        }
    }
}

// Counts a block's arrival after everything it wrote is visible. Returns true in the last of
// `blocks`, which then sees the writes of all.
__device__ __forceinline__ bool is_last_to_arrive(int* counter, long long blocks) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(counter, 1) == blocks - 1;
        if (is_last) *counter = 0;  // ready for the next launch
    }
    __syncthreads();
    if (is_last) __threadfence();
    return is_last;
}

// Sums over the warps, and over the blocks that share a strip. The last block to arrive adds all
// sums in a fixed order, so that the result does not depend on the order of arrival.
template <class T>
__device__ __forceinline__ void write_strip(const Item& item, long long strip, long long split,
                                            const int (&places)[COLUMNS],
                                            typename Compute<T>::type* space,
                                            typename Compute<T>::type (&sums)[COLUMNS * RANK],
                                            typename Compute<T>::type* partials, int* counters) {
    using A = typename Compute<T>::type;
    const int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, rank = (int)item.rank;
    T* q = (T*)item.q + strip * WIDTH;
    const long long left_over = item.columns - strip * WIDTH;
    const int width = left_over < WIDTH ? (int)left_over : WIDTH;
    A* of_strip = partials + item.partials + strip * item.splits * RANK * WIDTH;
#pragma unroll
    for (int r = 0; r < RANK; r++) {
        if (r >= rank) continue;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) space[warp * WIDTH + places[k]] = sums[k * RANK + r];
        __syncthreads();
        for (int c = threadIdx.x; c < width; c += blockDim.x) {
            A total = 0;
            for (int w = 0; w < warps; w++) total += space[w * WIDTH + c];
            if (item.splits == 1) narrow(total, q + r * item.columns + c);
            else of_strip[(split * RANK + r) * WIDTH + c] = total;
        }
    }
    if (item.splits == 1 || !is_last_to_arrive(counters + item.counters + strip, item.splits))
        return;
    for (int i = threadIdx.x; i < rank * WIDTH; i += blockDim.x) {
        const int r = i / WIDTH, c = i % WIDTH;
        if (c >= width) continue;
        A total = 0;
        for (long long s = 0; s < item.splits; s++)
            total += load_shared_by_blocks(of_strip + (s * RANK + r) * WIDTH + c);
        narrow(total, q + r * item.columns + c);
    }
}

template <class T>
__device__ __forceinline__ void backproject(const Item* items, const int* owners,
                                            typename Compute<T>::type scale,
                                            typename Compute<T>::type* partials, int* counters) {
    using A = typename Compute<T>::type;
    alignas(16)
        __shared__ A space[TILE * RANK > MAX_WARPS * WIDTH ? TILE * RANK : MAX_WARPS * WIDTH];
    const Item item = items[owners[blockIdx.x]];
    const long long block = blockIdx.x - item.column_block, strip = block / item.splits,
                    split = block % item.splits;
    A sums[COLUMNS * RANK] = {};
    int places[COLUMNS];
    by_width<COLUMNS, T>((unsigned long long)item.m | item.columns * sizeof(T), [&](auto width) {
        multiply_strip<T, decltype(width)::value>(item, strip, split, scale, space, sums);
#pragma unroll
        for (int k = 0; k < COLUMNS; k++)
            places[k] = column_of<decltype(width)::value>(threadIdx.x % WARP, k);
    });
    write_strip<T>(item, strip, split, places, space, sums, partials, counters);
}

// Shared memory in which the warps of a block exchange RANK partial sums.
template <class A>
struct Sums {
    A of_warps[RANK * SWEEP_WARPS];
    A totals[RANK];
};

constexpr int GROUP = RANK < 8 ? RANK : 8;  // sums in registers at once

template <class A>
__device__ __forceinline__ void deposit(Sums<A>& sums, int start, A (&mine)[GROUP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    sum_over_warp<GROUP, WARP / 2>(mine);
    if (lane % (WARP / GROUP) == 0)
        sums.of_warps[(start + lane * GROUP / WARP) * SWEEP_WARPS + warp] = mine[0];
}

// Each warp adds one of the sums. Two barriers are enough: all of these sums are added before any
// warp deposits the next ones.
template <class A>
__device__ __forceinline__ void add_up(Sums<A>& sums) {
    const int lane = threadIdx.x % WARP;
    __syncthreads();
    for (int j = threadIdx.x / WARP; j < RANK; j += SWEEP_WARPS) {
        A total = lane < SWEEP_WARPS ? sums.of_warps[j * SWEEP_WARPS + lane] : A(0);
        sum_over_warp<1, SWEEP_WARPS / 2>(&total);
        if (lane == 0) sums.totals[j] = total;
    }
    __syncthreads();
}

template <class A>
__device__ __forceinline__ A inverse_norm(const Sums<A>& sums, A epsilon) {
    const A norm = root(sums.totals[0]) + epsilon;
    return norm == 0 ? A(0) : 1 / norm;
}

template <class A>
__device__ constexpr int held_rows() {
    return HELD_BYTES / (int)sizeof(A) / RANK < MAX_HELD ? HELD_BYTES / (int)sizeof(A) / RANK
                                                         : MAX_HELD;
}

// Hides from the compiler that the address is the same, so that values derived from it are computed
// again instead of occupying registers.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
#if defined(__HIP__)
    asm volatile("" : "+v"(p));
#elif !defined(MPIDIST_HOST)
    asm volatile("" : "+l"(p));
#endif
    return p;
}

// Two sweeps of modified Gram-Schmidt; the second removes the components that rounding left. One
// block processes a matrix, and each thread holds its rows in registers, so threads exchange only
// sums. A column of zeros remains zero. The columns rotate so that the current one is always the
// first, because registers cannot be indexed at run time; columns beyond the matrix's rank are
// zero.
template <class T>
__device__ __forceinline__ void sweep_registers(T* v, int n, int rank,
                                                typename Compute<T>::type epsilon,
                                                Sums<typename Compute<T>::type>& sums) {
    using A = typename Compute<T>::type;
    // Rows of a thread, and the granularity at which rows beyond the matrix are skipped.
    constexpr int HELD = held_rows<A>(), SKIP = 4;
    A held[HELD][RANK];
#pragma unroll
    for (int j = 0; j < RANK; j++) {
        const T* column = v + (long long)j * n;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const int row = k * SWEEP_THREADS + threadIdx.x;
            held[k][j] = row < n && j < rank ? widen(column[row]) : A(0);
        }
    }
    for (int step = 0; step < 2 * RANK; step++) {
        const int i = step % RANK;
        A inverse = 0;
        if (i < rank) {
#pragma unroll
            for (int start = 0; start < RANK; start += GROUP) {
                A dots[GROUP] = {};  // of column i with itself and later columns
#pragma unroll
                for (int k = 0; k < HELD; k++) {
                    if (k % SKIP == 0 && k * SWEEP_THREADS >= n) break;
#pragma unroll
                    for (int j = 0; j < GROUP; j++) dots[j] += held[k][0] * held[k][start + j];
                }
                deposit(sums, start, dots);
            }
            add_up(sums);
            inverse = inverse_norm(sums, epsilon);
        }
        A own[HELD];
#pragma unroll
        for (int k = 0; k < HELD; k++) own[k] = held[k][0] * inverse;
#pragma unroll
        for (int j = 1; j < RANK; j++) {
            const A share = i + j < rank ? sums.totals[j] * inverse : A(0);
#pragma unroll
            for (int k = 0; k < HELD; k++) {
                if (k % SKIP == 0 && k * SWEEP_THREADS >= n) break;
                held[k][j - 1] = held[k][j] - own[k] * share;
            }
        }
#pragma unroll
        for (int k = 0; k < HELD; k++) held[k][RANK - 1] = own[k];
    }
#pragma unroll
    for (int j = 0; j < RANK; j++) {
        v = opaque(v);
        T* column = v + (long long)j * n;
#pragma unroll
        for (int k = 0; k < HELD; k++) {
            const int row = k * SWEEP_THREADS + threadIdx.x;
            if (row < n && j < rank) narrow(held[k][j], column + row);
        }
    }
}

// The same for any number of rows, which stay in memory.
template <class T>
__device__ __forceinline__ void sweep_memory(T* v, long long n, int rank,
                                             typename Compute<T>::type epsilon,
                                             Sums<typename Compute<T>::type>& sums) {
    using A = typename Compute<T>::type;
    for (int step = 0; step < 2 * rank; step++) {
        const int behind = rank - step % rank;
        T* column = v + step % rank * n;
#pragma unroll
        for (int start = 0; start < RANK; start += GROUP) {
            A dots[GROUP] = {};
            for (long long row = threadIdx.x; row < n; row += SWEEP_THREADS) {
                const A own = widen(column[row]);
#pragma unroll
                for (int j = 0; j < GROUP; j++)
                    if (start + j < behind) dots[j] += own * widen(column[(start + j) * n + row]);
            }
            deposit(sums, start, dots);
        }
        add_up(sums);
        const A inverse = inverse_norm(sums, epsilon);
        for (long long row = threadIdx.x; row < n; row += SWEEP_THREADS) {
            const A own = widen(column[row]) * inverse;
            narrow(own, column + row);
            for (int j = 1; j < behind; j++)
                narrow(widen(column[j * n + row]) - own * (sums.totals[j] * inverse),
                       column + j * n + row);
        }
    }
}

// Tall matrices: Cholesky QR. Many blocks compute G = V^T V = R^T R, and a second launch computes
// V R^-1, all in fp64. The loss of orthogonality is 1e-16 times the square of V's condition number;
// in fp32 a second round would be needed. R has a positive diagonal, so columns have the same signs
// as with Gram-Schmidt.
constexpr int SQUARE = RANK * RANK;
constexpr int EDGE = RANK < 4 ? RANK : 4;  // of the tile of G that a warp sums
constexpr int TILES = RANK / EDGE * (RANK / EDGE);
// Stored in place of the inverse factor, whose first element is never negative: no work is left.
constexpr double DONE = -1;
constexpr int SLICES = TILES < SWEEP_WARPS ? SWEEP_WARPS / TILES : 1;  // warps that share a tile

__device__ __forceinline__ bool is_upper(int element) { return element % RANK >= element / RANK; }

// The upper triangle of a segment's Gram matrix, in SLICES parts.
template <class T>
__device__ __forceinline__ void multiply_segment(const T* v, long long n, int rank, long long start,
                                                 long long end, double* parts) {
    const int lane = threadIdx.x % WARP;
    for (int task = threadIdx.x / WARP; task < TILES * SLICES; task += SWEEP_WARPS) {
        const int slice = task % SLICES, top = task / SLICES / (RANK / EDGE) * EDGE,
                  left = task / SLICES % (RANK / EDGE) * EDGE;
        if (left < top) continue;
        double sums[EDGE * EDGE] = {};
        for (long long row = start + slice * WARP + lane; row < end; row += SLICES * WARP) {
            double a[EDGE], b[EDGE];
#pragma unroll
            for (int i = 0; i < EDGE; i++) {
                a[i] = top + i < rank ? (double)widen(v[(top + i) * n + row]) : 0;
                b[i] = left + i < rank ? (double)widen(v[(left + i) * n + row]) : 0;
            }
#pragma unroll
            for (int i = 0; i < EDGE * EDGE; i++) sums[i] += a[i / EDGE] * b[i % EDGE];
        }
        constexpr int COUNT = EDGE * EDGE;
        sum_over_warp<COUNT, WARP / 2>(sums);
        const int i = lane * COUNT / WARP;
        if (lane % (WARP / COUNT) == 0)
            parts[slice * SQUARE + (top + i / EDGE) * RANK + left + i % EDGE] = sums[0];
    }
    __syncthreads();
}

__device__ __forceinline__ double total_of_slices(const double* parts, int element) {
    double total = 0;
    for (int slice = 0; slice < SLICES; slice++) total += parts[slice * SQUARE + element];
    return total;
}

// Gaussian elimination without pivoting on G augmented by the identity: the upper triangle becomes
// D U with G = U^T D U, the lower triangle that of U^-T. Columns of zeros are skipped.
//
// Returns false if the result would be inexact: if the component of a column outside the span of
// the earlier ones is too small, or if epsilon, which Gram-Schmidt adds to the norms, is not small,
// because the error in direction grows with its square. The component is compared with the sum of
// all squares that are subtracted, not with the column alone: earlier columns are subtracted times
// a row of U^-T, which is large where they are nearly dependent, and G's rounding errors grow with
// it.
__device__ __forceinline__ bool eliminate(double* g, const double* squares, int rank, double least,
                                          double epsilon) {
    if (epsilon > 2e-4) return false;
    for (int i = 0; i < rank; i++) {
        if (squares[i] == 0) continue;
        const double pivot = g[i * RANK + i];
        double subtracted = squares[i];
        for (int k = 0; k < i; k++) subtracted += squares[k] * g[i * RANK + k] * g[i * RANK + k];
        if (!(pivot >= least * subtracted && pivot > epsilon * epsilon)) return false;
        for (int element = threadIdx.x; element < SQUARE; element += SWEEP_THREADS) {
            const int row = element / RANK, column = element % RANK;
            if (row <= i || row >= rank || (i < column && column < row)) continue;
            g[element] -= g[i * RANK + row] / pivot * (column == i ? 1 : g[i * RANK + column]);
        }
        __syncthreads();
    }
    return true;
}

// 1 / norm, with the effect of epsilon in two sweeps of Gram-Schmidt.
__device__ __forceinline__ double inverse_pivot(double pivot, double square, double epsilon) {
    if (square == 0) return 0;
    const double norm = root(pivot), once = norm / (norm + epsilon);
    return once / (once + epsilon) / norm;
}

template <class T>
__device__ __forceinline__ void factorize(T* v, long long n, int rank, const Sweep& sweep,
                                          typename Compute<T>::type epsilon,
                                          Sums<typename Compute<T>::type>& sums, double* grams,
                                          int* counters) {
    // Smallest part of the squares that it is a difference of: the sine of an angle of 3e-3 or
    // 1e-4.
    constexpr double LEAST = sizeof(T) == 8 ? 1e-5 : 1e-8;
    __shared__ double parts[SLICES * SQUARE];
    __shared__ double squares[RANK];
    const long long block = blockIdx.x - sweep.block, start = block * sweep.segment;
    const long long end = start + sweep.segment < n ? start + sweep.segment : n;
    double* of_blocks = grams + sweep.gram;
    multiply_segment(v, n, rank, start, end, parts);
    for (int i = threadIdx.x; i < SQUARE; i += SWEEP_THREADS)
        if (is_upper(i)) of_blocks[block * SQUARE + i] = total_of_slices(parts, i);
    if (!is_last_to_arrive(counters + sweep.counter, sweep.blocks)) return;
    for (int i = threadIdx.x; i < SLICES * SQUARE; i += SWEEP_THREADS) {
        if (!is_upper(i % SQUARE)) continue;
        double total = 0;
        for (long long other = i / SQUARE; other < sweep.blocks; other += SLICES)
            total += load_shared_by_blocks(of_blocks + other * SQUARE + i % SQUARE);
        parts[i] = total;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SQUARE; i += SWEEP_THREADS) {
        const double total = is_upper(i) ? total_of_slices(parts, i) : 0;
        parts[i] = total;
        if (i % (RANK + 1) == 0) squares[i / RANK] = total;
    }
    __syncthreads();
    const bool is_regular = eliminate(parts, squares, rank, LEAST, epsilon);
    for (int i = threadIdx.x; i < SQUARE; i += SWEEP_THREADS) {
        const int row = i / RANK, column = i % RANK;
        const double inverse = inverse_pivot(parts[column * (RANK + 1)], squares[column], epsilon);
        of_blocks[i] = !is_regular     ? DONE
                       : row == column ? inverse
                       : row < column  ? parts[column * RANK + row] * inverse
                                       : 0;
    }
    if (!is_regular) sweep_memory(v, n, rank, epsilon, sums);
}

template <class T>
__device__ __forceinline__ void orthogonalize(const Item* items, const int* owners, int is_q,
                                              typename Compute<T>::type epsilon, double* grams,
                                              int* counters) {
    __shared__ Sums<typename Compute<T>::type> sums;
    // A reference, because a copy indexed by `is_q` at run time would be placed in local memory.
    const Item& item = items[owners[blockIdx.x]];
    const Sweep sweep = item.sweeps[is_q];
    T* v = (T*)(is_q ? item.q : item.p);
    const long long n = is_q ? item.columns : item.rows;
    if (sweep.blocks == 1) sweep_registers(v, (int)n, (int)item.rank, epsilon, sums);
    else factorize(v, n, (int)item.rank, sweep, epsilon, sums, grams, counters);
}

// V R^-1 for tall matrices.
template <class T>
__device__ __forceinline__ void normalize(const Item* items, const int* owners, int is_q,
                                          const double* grams) {
    using A = typename Compute<T>::type;
    // Columns that are unrolled; with more, the compiler would read the whole factor in advance.
    constexpr int AT_ONCE = RANK <= 8 ? RANK : 1;
    __shared__ double inverse[SQUARE];
    const Item& item = items[owners[blockIdx.x]];
    const Sweep sweep = item.sweeps[is_q];
    const int rank = (int)item.rank;
    if (sweep.blocks == 1) return;
    for (int i = threadIdx.x; i < SQUARE; i += SWEEP_THREADS) inverse[i] = grams[sweep.gram + i];
    __syncthreads();
    if (inverse[0] == DONE) return;
    const long long n = is_q ? item.columns : item.rows,
                    start = (blockIdx.x - sweep.block) * sweep.segment;
    const long long end = start + sweep.segment < n ? start + sweep.segment : n;
    T* v = (T*)(is_q ? item.q : item.p);
    for (long long row = start + threadIdx.x; row < end; row += SWEEP_THREADS) {
        double x[RANK];
#pragma unroll
        for (int j = 0; j < RANK; j++) x[j] = j < rank ? (double)widen(v[j * n + row]) : 0;
#pragma unroll AT_ONCE
        for (int j = 0; j < RANK; j++) {
            if (j >= rank) continue;
            double sum = 0;
#pragma unroll
            for (int i = 0; i < RANK; i++)
                if (i <= j) sum += x[i] * inverse[i * RANK + j];
            narrow((A)sum, v + j * n + row);
        }
    }
}

#define POWERSGD(T)                                                                          \
    extern "C" __global__ void project_##T(const Item* items, const int* owners,             \
                                           typename Compute<T>::type scale) {                \
        project<T>(items, owners, scale);                                                    \
    }                                                                                        \
    extern "C" __global__ void backproject_##T(                                              \
        const Item* items, const int* owners, typename Compute<T>::type scale,               \
        typename Compute<T>::type* partials, int* counters) {                                \
        backproject<T>(items, owners, scale, partials, counters);                            \
    }                                                                                        \
    extern "C" __global__ void reconstruct_##T(const Item* items, const int* owners) {       \
        reconstruct<T>(items, owners);                                                       \
    }                                                                                        \
    extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)                           \
        orthogonalize_##T(const Item* items, const int* owners, int is_q,                    \
                          typename Compute<T>::type epsilon, double* grams, int* counters) { \
        orthogonalize<T>(items, owners, is_q, epsilon, grams, counters);                     \
    }                                                                                        \
    extern "C" __global__ void __launch_bounds__(SWEEP_THREADS, 1)                           \
        normalize_##T(const Item* items, const int* owners, int is_q, const double* grams) { \
        normalize<T>(items, owners, is_q, grams);                                            \
    }

// A bucket has one type; compiling all types takes four times as long.
#ifdef ELEMENT
#define EXPANDED(T) POWERSGD(T)
EXPANDED(ELEMENT)
#else
POWERSGD(float)
POWERSGD(double)
POWERSGD(float16)
POWERSGD(bfloat16)
#endif

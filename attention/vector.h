// Vectors of the machine's width, the number formats, exp, one register-blocked product, and the threads.
//
// Everything here is compiled on the machine that runs it (-march=native), so that plain macros tell what there is.
// Kernels are functions `int64_t name(const int64_t* arguments, Member* member)`: one signature, so that a recorded step
// is a list of functions and argument arrays. Pointers, sizes and the bits of doubles all travel as 64-bit integers; a
// kernel returns 0 when all is well.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
constexpr int LANES = 16, ROWS = 12;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, ROWS = 3;
#else  // NEON, or whatever the compiler makes of it
constexpr int LANES = 4, ROWS = 3;
#endif
#if defined(WIDE) && defined(__AVX512BF16__)
#define BF16_PAIRS 1  // an instruction multiplies pairs of bf16 and adds both products in fp32
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))
constexpr int64_t LINE = 64;  // bytes that come from memory together
constexpr int COLUMNS = 32;  // of a product's block: COLUMNS / LANES vectors times ROWS rows fill the registers

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};
typedef float floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));

static inline floats spread(float x) { return x - floats{}; }

static inline floats load(const float* p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline floats load(const bf16* p) {
    halves h;
    memcpy(&h, p, sizeof h);
    return (floats)(__builtin_convertvector(h, words) << 16);
}
static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
static inline float to_float(fp16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    float y;
    if (rest >= 0x7c00) {  // infinities and NaN
        uint32_t bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
        memcpy(&y, &bits, 4);
        return y;
    }
    uint32_t bits = rest << 13;
    memcpy(&y, &bits, 4);
    y *= 0x1p112f;  // the difference of the exponents' biases; exact for subnormal numbers too
    return sign ? -y : y;
}
static inline floats load(const fp16* p) {
#if defined(WIDE)
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    floats v;
    for (int i = 0; i < LANES; i++) v[i] = to_float(p[i]);
    return v;
#endif
}

static inline void store(float* p, floats v) { memcpy(p, &v, sizeof v); }
static inline void store(bf16* p, floats v) {  // to nearest, ties to even
#if defined(BF16_PAIRS)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);  // makes zeros of subnormal numbers
    memcpy(p, &rounded, sizeof rounded);
#else
    words u = (words)v, number = (words)(v == v);
    words rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    halves h = __builtin_convertvector((rounded & number) | (0x7fc0 & ~number), halves);
    memcpy(p, &h, sizeof h);
#endif
}
static inline fp16 to_fp16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    uint16_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return {(uint16_t)(sign | 0x7e00)};
    if (u >= 0x477ff000) return {(uint16_t)(sign | 0x7c00)};
    if (u < 0x38800000) {  // subnormal in fp16: let an addition round at the right bit
        float y;
        memcpy(&y, &u, 4);
        y += 0.5f;
        memcpy(&u, &y, 4);
        return {(uint16_t)(sign | (u - 0x3f000000))};
    }
    return {(uint16_t)(sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13)};
}
static inline void store(fp16* p, floats v) {
#if defined(WIDE)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++) p[i] = to_fp16(v[i]);
#endif
}

// The first n of LANES numbers; the others are zero, or are left alone.
template <class T>
static inline floats load(const T* p, int64_t n) {
    if (n >= LANES) return load(p);
    T part[LANES] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T>
static inline void store(T* p, floats v, int64_t n) {
    if (n >= LANES) return store(p, v);
    T part[LANES];
    store(part, v);
    memcpy(p, part, n * sizeof(T));
}

static inline floats larger(floats a, floats b) { return a > b ? a : b; }
static inline float sum(floats v) {
#if defined(WIDE)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}
static inline float largest(floats v) {
#if defined(WIDE)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = std::max(best, v[i]);
    return best;
#endif
}
static inline words lane_numbers() {
    words v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

// Within 2 units in the last place; 0 far below -87, where subnormal numbers may come out or not.
static inline floats exponential(floats x) {
#if defined(WIDE)
    // NaN, as the second operand of both, stays NaN.
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(-200.f), _mm512_min_ps(_mm512_set1_ps(88.f), (__m512)x));
    const floats n = (floats)_mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), 0);
#else
    const floats small = spread(-87.f), big = spread(88.f);
    const ints kept = ~(x < small);  // NaN stays NaN
    floats y = x > big ? big : x;
    y = x < small ? floats{} : y;
    const floats shifted = y * 1.44269504f + 12582912.f;  // adding 1.5 * 2**23 rounds to an integer
    const floats n = shifted - 12582912.f;
#endif
    floats r = (floats)y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    floats p = spread(1.3981999507e-3f);
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
#if defined(WIDE)
    return (floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const words power = ((words)shifted + 127) << 23;  // the low bits of `shifted` hold n
    return (floats)((words)(p * (floats)power) & (words)kept);
#endif
}

static inline floats silu(floats x) { return x / (1.f + exponential(-x)); }

// The numbers as they are once they have been stored.
template <class T>
static inline floats rounded(floats v) {
    T part[LANES];
    store(part, v);
    return load(part);
}

// What a vector of the right is to one step in depth of a block product, and the step: a scalar of the left times that.
template <class B>
static inline floats take(const B* b) {
    return load(b);
}
template <class B>
static inline void look_ahead(const B*) {}  // the processor does by itself
static inline floats step(floats sum, float a, floats b) { return sum + a * b; }
#if defined(BF16_PAIRS)
static inline __m512i take(const uint32_t* b) { return _mm512_loadu_si512(b); }
static inline floats step(floats sum, uint32_t a, __m512i b) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
}
#endif

// The right side of a product, with lines of memory to ask for at every step of depth.
template <class B, class Lines>
struct Asking {
    const B* at;
    Lines* lines;

    Asking operator+(int64_t columns) const { return {at + columns, lines}; }
    void operator+=(int64_t stride) { at += stride; }
};
template <class B, class Lines>
static inline auto take(Asking<B, Lines> b) {
    return take(b.at);
}
template <class B, class Lines>
static inline void look_ahead(Asking<B, Lines> b) {
    b.lines->ask();
}

// c [R, PANELS * COLUMNS] (+)= a [R, depth] times b [depth, PANELS * COLUMNS]. The sums run over depth in order, whatever R is, so that
// a row's result does not depend on how many rows are computed with it.
template <int PANELS, int R, class A, class B>
static inline void product_block(
    const A* a, int64_t lda, B b, int64_t ldb, int64_t depth, float* c, int64_t ldc, bool add) {
    constexpr int V = PANELS * COLUMNS / LANES, APART = 3, POINTERS = (R + APART - 1) / APART;
    floats sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = add ? load(c + r * ldc + v * LANES) : floats{};
    // An instruction adds 0, 1 or 2 times a distance to a pointer. The compiler must not know where the pointers come from,
    // or it keeps one for every row, more than there are registers.
    const A* rows[POINTERS];
    for (int i = 0; i < POINTERS; i++) {
        rows[i] = a + i * APART * lda;
        asm("" : "+r"(rows[i]));
    }
    for (int64_t k = 0; k < depth; k++, b += ldb) {
        look_ahead(b);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = step(sums[r][v], rows[r / APART][r % APART * lda], take(b + v * LANES));
        for (int i = 0; i < POINTERS; i++) rows[i]++;
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(c + r * ldc + v * LANES, sums[r][v]);
}

// b: a pointer, or what walks over columns and steps of depth like one.
template <int PANELS = 1, class A, class B>
static void product(
    const A* a, int64_t lda, B b, int64_t ldb, int64_t depth, float* c, int64_t ldc, bool add, int64_t rows) {
    auto rest = [&](auto count) {
        constexpr int R = decltype(count)::value;
        if constexpr (R * PANELS <= ROWS)
            for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
                product_block<PANELS, R>(a, lda, b, ldb, depth, c, ldc, add);
    };
    rest(std::integral_constant<int, 12>());
    rest(std::integral_constant<int, 8>());
    rest(std::integral_constant<int, 6>());
    rest(std::integral_constant<int, 4>());
    rest(std::integral_constant<int, 3>());
    rest(std::integral_constant<int, 2>());
    rest(std::integral_constant<int, 1>());
}

// body(T()) for the number format that Python calls `format`.
template <class Body>
static void with_format(int64_t format, Body&& body) {
    if (format == 0) body(float());
    if (format == 1) body(bf16());
    if (format == 2) body(fp16());
}

// torch's own OpenMP runtime, by the one entry that both GNU's and LLVM's have. No other one is linked.
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// body(), in as many threads as the runtime grants.
template <class Body>
static void in_threads(int64_t threads, Body&& body) {
    if (threads <= 1) return body();
    using Plain = std::remove_reference_t<Body>;
    GOMP_parallel([](void* data) { (*static_cast<Plain*>(data))(); }, &body, threads, 0);
}

static inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// One thread's way through a step that all threads of a team walk kernel by kernel (replay.cpp). The pieces of a kernel
// are taken by whoever is there; it is done when its pieces are, whether or not every thread has come. A thread that
// the system has put aside holds up the others only if it was in the middle of a piece, and skips what it has missed.
struct alignas(64) Task {
    std::atomic<int64_t> next, done;
};
struct Team {
    Task* tasks;
    std::atomic<int64_t> status;
    std::mutex mutex;
    int64_t prepared;  // the last task whose shared memory was prepared
    std::vector<char>* memory;
};
struct Member {
    Team* team;
    int64_t task;
};

// body(i) for i in [0, count), in any order. member: null for a call outside of a team, which then gets threads itself.
template <class Body>
static void parallel_each(Member* member, int64_t threads, int64_t count, Body&& body) {
    if (!member) {
        std::atomic<int64_t> next{0};
        return in_threads(std::min(threads, count), [&] {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
        });
    }
    Task& task = member->team->tasks[member->task++];
    while (task.next.load(std::memory_order_relaxed) < count) {
        const int64_t i = task.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= count) break;
        body(i);
        task.done.fetch_add(1, std::memory_order_acq_rel);
    }
    for (int64_t spins = 1; task.done.load(std::memory_order_acquire) < count; spins++)
        spins % 2000 ? pause_briefly() : (void)sched_yield();
}

// body(first, stop): [0, count) in contiguous ranges, a few for each thread.
template <class Body>
static void parallel_ranges(Member* member, int64_t threads, int64_t count, Body&& body) {
    const int64_t pieces = std::min(count, threads == 1 ? 1 : 4 * threads);
    parallel_each(member, threads, pieces, [&](int64_t i) { body(count * i / pieces, count * (i + 1) / pieces); });
}

// Memory that a thread keeps from call to call, because allocating per call would cost more than many kernels do.
template <class T>
static T* scratch(std::vector<T>& memory, size_t count) {
    if (memory.size() < count) memory.resize(count);
    return memory.data();
}

// Memory for the next parallel_each that all its threads see, filled by prepare(memory) before any of them begins.
template <class Prepare>
static char* shared(Member* member, size_t bytes, Prepare&& prepare) {
    static thread_local std::vector<char> own;
    if (!member) {
        prepare(scratch(own, bytes));
        return own.data();
    }
    Team& team = *member->team;
    std::lock_guard<std::mutex> lock(team.mutex);
    if (team.prepared < member->task) {
        prepare(scratch(*team.memory, bytes));
        team.prepared = member->task;
    }
    return team.memory->data();
}

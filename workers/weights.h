// The layouts of a packed weight: plain numbers, int8 with a scale for each output, int4 with a scale and an offset for each
// group of each output.
//
// A weight [outputs, depth] lies in panels of COLUMNS outputs, so that both one row and many rows read it from front to
// back; a single copy serves every number of rows, and embedding lookups too. A panel is one step of depth after another:
//
//     plain, int8   [COLUMNS]        or, where the machine multiplies pairs of bf16, [COLUMNS][2] with two of depth a step
//     int4          the same, of 32 numbers in a row the second 16 in the upper halves of the bytes of the first
//
// Integers of eight bits are exact in bf16, so that they are multiplied as plain bf16 is, and scaled after. int4 become
// numbers of T with their scales and offsets, bf16 or fp32, before they are multiplied.
#pragma once

#include "../attention/vector.h"

#if defined(BF16_PAIRS)
template <class T>
constexpr bool PAIRS = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool PAIRS = false;
#endif

// Numbers of T in one step of depth.
template <class T>
constexpr int64_t UNIT = PAIRS<T> ? 2 : 1;

struct int8 {
    int8_t value;
};
static inline floats load(const int8* p) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    bytes v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, ints), floats);
}

#if defined(BF16_PAIRS)
// Each number twice: what lies side by side is a pair of depth.
static inline void twice(floats all, floats* to) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    to[0] = (floats)_mm512_permutexvar_ps(low, (__m512)all);
    to[1] = (floats)_mm512_permutexvar_ps(_mm512_add_epi32(low, _mm512_set1_epi32(8)), (__m512)all);
}
#endif

// Scales and offsets of one group in one panel, as the steps of depth take them.
template <int64_t UNIT>
struct Scales {
    floats scale[COLUMNS / LANES * UNIT], offset[COLUMNS / LANES * UNIT];

    // stored: [2, COLUMNS]
    template <class S>
    explicit Scales(const S* stored) {
        expand(stored, scale);
        expand(stored + COLUMNS, offset);
    }

    template <class S>
    static void expand(const S* stored, floats* to) {
        for (int v = 0; v < COLUMNS; v += LANES) {
            const floats all = load(stored + v);
            floats* part = to + v / LANES * UNIT;
#if defined(BF16_PAIRS)
            if constexpr (UNIT == 2) {
                twice(all, part);
                continue;
            }
#endif
            part[0] = all;
        }
    }
};

// Making numbers of integers keeps the processor too busy to ask for memory far enough ahead by itself.
constexpr int64_t AHEAD_BYTES = 2048;
static inline void look_ahead(const int8* p) { __builtin_prefetch((const char*)p + AHEAD_BYTES); }

// Walks over packed int4 as a pointer does over numbers.
template <int64_t UNIT>
struct Nibbles {
    const uint8_t* bytes;
    const Scales<UNIT>* scales;
    int64_t column;

    Nibbles operator+(int64_t columns) const { return {bytes, scales, column + columns}; }
    void operator+=(int64_t stride) { bytes += stride; }
};
template <int64_t UNIT>
static inline void look_ahead(const Nibbles<UNIT>& n) {
    __builtin_prefetch(n.bytes + AHEAD_BYTES);
}
static inline floats take(Nibbles<1> n) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes v;
    memcpy(&v, n.bytes + n.column % (COLUMNS / 2), sizeof v);
    const words both = __builtin_convertvector(v, words);
    const words code = n.column < COLUMNS / 2 ? both & 15 : both >> 4;
    const int64_t i = n.column / LANES;
    return n.scales->scale[i] * __builtin_convertvector((ints)code - 8, floats) + n.scales->offset[i];
}

#if defined(BF16_PAIRS)
struct int8_pair {
    int8_t values[2];
};
static inline void look_ahead(const int8_pair* p) { __builtin_prefetch((const char*)p + AHEAD_BYTES); }
static inline __m512i take(const int8_pair* p) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p + 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
static inline __m512i take(Nibbles<2> n) {
    const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const int64_t i = n.column / LANES * 2;
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(n.bytes + n.column)));
    const floats low = (floats)_mm512_permutexvar_ps(both, numbers);  // takes four bits
    const floats high = (floats)_mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
    const floats first = low * n.scales->scale[i] + n.scales->offset[i];
    const floats second = high * n.scales->scale[i + 1] + n.scales->offset[i + 1];
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
#endif

// Two panels read as one of twice the width.
template <class Reader>
struct SideBySide {
    Reader left, right;

    Reader operator+(int64_t columns) const { return columns < COLUMNS ? left + columns : right + (columns - COLUMNS); }
    void operator+=(int64_t stride) {
        left += stride;
        right += stride;
    }
};

template <class Reader>
static inline void look_ahead(const SideBySide<Reader>& both) {
    look_ahead(both.left);
    look_ahead(both.right);
}

// Each layout: the number as it was before packing, the bytes of a step, for how many rows integers are converted anew with
// every block of rows, how a product walks over a panel, and one number's place: `index` is its column times UNIT, plus its
// place within the step.
template <class T>
struct Plain {
    using Number = T;
    using Element = std::conditional_t<PAIRS<T>, uint32_t, T>;
    static constexpr bool INTEGERS = false, GROUPS = false;
    static constexpr int64_t BYTES = COLUMNS * UNIT<T> * sizeof(T), STRIDE = COLUMNS;

    static const Element* reader(const char* step) { return (const Element*)step; }
    static void put(char* step, int64_t index, T number) { ((T*)step)[index] = number; }
    static float get(const char* step, int64_t index) { return to_float(((const T*)step)[index]); }
};

template <class T>
struct Int8 {
    using Number = int8_t;
#if defined(BF16_PAIRS)
    using Element = std::conditional_t<PAIRS<T>, int8_pair, int8>;
#else
    using Element = int8;
#endif
    static constexpr bool INTEGERS = true, GROUPS = false;
    static constexpr int64_t FEW = ROWS, BYTES = COLUMNS * UNIT<T>, STRIDE = COLUMNS;

    static const Element* reader(const char* step) { return (const Element*)step; }
    static void put(char* step, int64_t index, int8_t number) { step[index] = number; }
    static float get(const char* step, int64_t index) { return ((const int8_t*)step)[index]; }
};

template <class T, class S>
struct Int4 {
    using Number = int8_t;
    using Scale = S;
    static constexpr bool INTEGERS = true, GROUPS = true;
    static constexpr int64_t FEW = std::min(ROWS, 6), HALF = 16, BYTES = COLUMNS / 2 * UNIT<T>, STRIDE = BYTES;

    static Nibbles<UNIT<T>> reader(const char* step, const Scales<UNIT<T>>& scales) {
        return {(const uint8_t*)step, &scales, 0};
    }
    static void put(char* step, int64_t index, int8_t number) {
        uint8_t& both = (uint8_t&)step[index / (2 * HALF) * HALF + index % HALF];
        both = index % (2 * HALF) < HALF ? (both & 0xf0) | (number + 8) : (both & 0x0f) | (number + 8) << 4;
    }
    static float get(const char* step, int64_t index) {
        const uint8_t both = step[index / (2 * HALF) * HALF + index % HALF];
        return (index % (2 * HALF) < HALF ? both & 15 : both >> 4) - 8;
    }
};

// body(layout) for a weight of so many bits that is multiplied with numbers of T; 0 bits: numbers of T too.
// fp32_scales: of int4, whose scales are bf16 otherwise.
template <class T, class Body>
static void with_layout(int64_t bits, bool fp32_scales, Body&& body) {
    if (bits == 0) body(Plain<T>());
    if (bits == 8) body(Int8<T>());
    if (bits == 4 && !fp32_scales) body(Int4<T, bf16>());
    if (bits == 4 && fp32_scales) body(Int4<T, float>());
}

// The groups of a row's inputs: whole ones of the whole row, of which a rank may hold a part that begins inside of one.
struct Groups {
    int64_t size, begun;  // inputs of a group, and how many of the first one another rank holds

    int64_t of(int64_t column) const { return (begun + column) / size; }
    int64_t count(int64_t depth) const { return depth ? of(depth - 1) + 1 : 0; }
};

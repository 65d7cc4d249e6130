// Tiles of keys and values made ready for products, and memory asked for before it is needed.
#pragma once

#include "vector.h"

constexpr int KEYS = 64;  // of a tile

#if defined(WIDE)
// 16 rows of 16 words, `stride` words apart, to 16 columns of rows `width` words apart.
static inline void transpose_square(const uint32_t* from, int64_t stride, uint32_t* to, int64_t width) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + i * width, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * width, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 4) * width, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 12) * width, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}
#endif

// [KEYS, width] words -> [width, KEYS]; width is a multiple of 16.
static void transpose(const uint32_t* from, int64_t width, uint32_t* to) {
#if defined(WIDE)
    for (int64_t column = 0; column < width; column += 16)
        for (int64_t row = 0; row < KEYS; row += 16)
            transpose_square(from + row * width + column, width, to + column * KEYS + row, KEYS);
#else
    for (int64_t column = 0; column < width; column++)
        for (int64_t row = 0; row < KEYS; row++) to[column * KEYS + row] = from[row * width + column];
#endif
}

#if defined(BF16_PAIRS)
// 32 bf16 of each of two rows -> 32 pairs.
static inline void pair_up(__m512i even, __m512i odd, uint32_t* to) {
    alignas(64) static const int16_t low[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_load_si512(low), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, first, odd));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(even, second, odd));
}
#endif

// The cache lines that come next. They are asked for a few at a time between other work: all at once they fill the queue
// of what is under way, and hold that work up. They are asked into the second cache, whose queue is the longer one.
class Ahead {
public:
    // Rows are of `bytes`, and those of a run lie `stride` bytes apart.
    void clear(int64_t bytes, int64_t stride) {
        this->bytes = bytes, this->stride = stride;
        runs.clear();
        next = 0, left = 0, offset = bytes;
    }
    void add(const char* row, int64_t rows) { runs.push_back({row, rows}); }

    void ask() { ask<2>(); }  // with a step of a product
    template <int COUNT>
    void ask() {
        for (int i = 0; i < COUNT; i++, offset += LINE) {
            if (offset >= bytes && !begin_row()) return;
            __builtin_prefetch(row + offset, 0, 2);
        }
    }

private:
    struct Run {
        const char* row;
        int64_t rows;
    };

    bool begin_row() {
        if (left == 0) {
            if (next == runs.size()) return false;
            row = runs[next].row - stride, left = runs[next].rows;
            next++;
        }
        row += stride, left--, offset = 0;
        return true;
    }

    std::vector<Run> runs;
    size_t next = 0;
    int64_t left = 0, bytes = 0, stride = 0, offset = 0;
    const char* row = nullptr;
};

// As many columns at once as there are registers for the sums.
template <class A, class B>
static void wide_product(const A* a, int64_t lda, B b, int64_t ldb, int64_t depth, float* c, int64_t ldc, bool add, int64_t rows,
                         int64_t columns) {
    int64_t j = 0;
    if (rows <= ROWS / 2)
        for (; j + 2 * COLUMNS <= columns; j += 2 * COLUMNS)
            product<2>(a, lda, b + j, ldb, depth, c + j, ldc, add, rows);
    for (; j < columns; j += COLUMNS) product(a, lda, b + j, ldb, depth, c + j, ldc, add, rows);
}

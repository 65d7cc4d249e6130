// Online softmax (arXiv 1805.02867): scores of a tile of keys become weights relative to each row's running maximum.
#pragma once

#include "tiles.h"

// What has become of some rows so far: the highest score, the weights' total, and the weighted sums of values [rows, padded].
struct Running {
    float *top, *total, *sums;

    void clear(int64_t rows, int64_t padded) const {
        std::fill(top, top + rows, -INFINITY);
        std::fill(total, total + rows, 0.f);
        std::fill(sums, sums + rows * padded, 0.f);
    }
};

// Merges the result of a span into that of the spans before it: top, total, sums [padded]. One function for all, lest
// the compiler round differently here and there.
__attribute__((noinline)) static void merge_span(float* merged, float top, float total, const float* sums, int64_t padded) {
    const float highest = std::max(merged[0], top);
    if (highest == -INFINITY) return;  // no key has been seen
    const float fade = exponential(spread(merged[0] - highest))[0], weight = exponential(spread(top - highest))[0];
    merged[0] = highest;
    merged[1] = merged[1] * fade + total * weight;
    for (int64_t d = 2; d < padded + 2; d += LANES)
        store(merged + d, load(merged + d) * fade + load(sums + d - 2) * weight);
}

static void clear_span(float* merged, int64_t padded) {
    std::fill(merged, merged + padded + 2, 0.f);
    merged[0] = -INFINITY;
}

// Of a row's scores those of keys [from, to) are seen, and the row begins with key `first`. Returns the highest.
static inline float scale_scores(float* row, float scale, int64_t first, int64_t from, int64_t to) {
    const bool all_seen = from <= first && first + KEYS <= to;
    floats best = spread(-INFINITY);
    for (int64_t j = 0; j < KEYS; j += LANES) {
        floats scaled = load(row + j) * scale;
        if (!all_seen) {
            const ints key = (ints)lane_numbers() + (int32_t)(first + j);
            const ints seen = (key >= (int32_t)from) & (key < (int32_t)to);
            scaled = seen ? scaled : spread(-INFINITY);
        }
        store(row + j, scaled);
        best = larger(scaled, best);
    }
    return largest(best);
}

// Where pairs are multiplied the weights are bf16, in the first half of their row. Returns them as stored.
template <bool PAIRS>
static inline floats store_weights(float* row, int64_t j, floats weights) {
#if defined(BF16_PAIRS)
    if constexpr (PAIRS) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)weights);
        _mm256_storeu_si256((__m256i*)((bf16*)row + j), rounded);
        return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    }
#endif
    store(row + j, weights);
    return weights;
}

// Scores [rows, KEYS] become weights, and older sums follow the new maximum. seen(row): {from, to} of the keys that it sees.
// All rows' maxima come before the first weight, and sums are scaled whether or not the maximum is a new one: a row that
// waited for its own maximum, or a branch that nobody can predict, held up the rows behind it.
template <bool PAIRS, class Seen>
static void soften(float* scores, int64_t rows, float scale, int64_t first, const Running& now, int64_t padded,
                   std::vector<float>& memory, Seen&& seen) {
    const int64_t room = (rows + LANES - 1) / LANES * LANES;
    float *base = scratch(memory, 2 * room), *fade = base + room;
    for (int64_t r = 0; r < rows; r++) {
        const auto [from, to] = seen(r);
        const float top = std::max(now.top[r], scale_scores(scores + r * KEYS, scale, first, from, to));
        // A row that has seen no key yet: all its weights are zero, and -inf - -inf must not be asked for.
        base[r] = top == -INFINITY ? 0.f : top;
        fade[r] = now.top[r] - base[r];
        now.top[r] = top;
    }
    for (int64_t r = 0; r < rows; r += LANES) store(fade + r, exponential(load(fade + r)));
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores + r * KEYS, *sums = now.sums + r * padded;
        floats total = {};
        for (int64_t j = 0; j < KEYS; j += LANES) total += store_weights<PAIRS>(row, j, exponential(load(row + j) - base[r]));
        now.total[r] = now.total[r] * fade[r] + sum(total);
        for (int64_t d = 0; d < padded; d += LANES) store(sums + d, load(sums + d) * fade[r]);
    }
}

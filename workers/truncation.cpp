// What truncation has to know of the logits of a rank's vocabulary range, and the cut itself (truncation.py, ranges.py).
//
// All is about a token's distance: its logit minus the row's largest, 0 and below. Without their sign, a distance's bits
// are an integer that sorts alike, its order: the nearest come first.
#include "../attention/vector.h"

typedef double doubles __attribute__((vector_size(LANES * 8)));
typedef int64_t longs __attribute__((vector_size(LANES * 8)));

// rows numbers `chosen` of logits [.., count], whose largest logits over all ranks are `tops`.
struct Range {
    int64_t threads, rows, chosen, count, logits, tops;
};

template <class Body>
static void each_row(const Range& r, Member* member, Body&& body) {
    parallel_each(member, r.rows * r.count < 1 << 16 ? 1 : r.threads, r.rows, [&](int64_t i) {
        body(i, (float*)r.logits + ((const int64_t*)r.chosen)[i] * r.count, ((const float*)r.tops)[i]);
    });
}

static inline bool any(ints mask) {
#if defined(WIDE)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= mask[lane];
    return found;
#endif
}

static inline ints order_of(floats below) { return (ints)below & 0x7fffffff; }

// For 0 and below, within 1 unit in the last place or two; next to nothing below -700.
static inline doubles exponential(doubles x) {
    x = x > -700. ? x : doubles{} - 700.;
    const doubles shifted = x * 1.4426950408889634 + 0x1.8p52;  // adding 1.5 * 2**52 rounds to an integer
    const doubles n = shifted - 0x1.8p52;
    const doubles r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    static constexpr double taylor[] = {
        1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040,
        1. / 720,       1. / 120,      1. / 24,      1. / 6,      1. / 2,     1.,        1.,
    };
    doubles p = doubles{} + 1. / 6227020800;
#pragma GCC unroll 13
    for (int i = 0; i < 13; i++) p = p * r + taylor[i];
    return p * (doubles)(((longs)shifted + 1023) << 52);  // the low bits of `shifted` hold n
}

// sums [rows, 256]: of the weights of tokens whose order, shifted, begins with the row's cut, by the 8 bits after that.
// A token weighs exp(distance / temperature) units, rounded; without temperatures, 1.
struct Weigh {
    Range range;
    int64_t temperatures, unit_bits, cuts, shift, sums;
};

EXPORT int64_t quadriga_weigh(const int64_t* arguments, Member* member) {
    const Weigh& w = *(const Weigh*)arguments;
    double unit;
    memcpy(&unit, &w.unit_bits, sizeof unit);
    each_row(w.range, member, [&](int64_t row, const float* logits, float top) {
        const uint32_t first = (uint32_t)((const int32_t*)w.cuts)[row] << 8;
        const double temperature = w.temperatures ? ((const double*)w.temperatures)[row] : 1;
        int64_t* sums = (int64_t*)w.sums + row * 256;
        std::fill(sums, sums + 256, 0);
        for (int64_t i = 0; i < w.range.count; i += LANES) {
            const int64_t rest = w.range.count - i;
            const floats below = load(logits + i, rest) - top;
            const words digits = (words)(order_of(below) >> (int32_t)w.shift) - first;
            if (!any((ints)(digits < 256))) continue;
            longs weights = longs{} + 1;
            if (w.temperatures) {
                const doubles likelihood = exponential(__builtin_convertvector(below, doubles) / temperature);
                weights = __builtin_convertvector(likelihood * unit + 0.5, longs);
            }
            for (int lane = 0; lane < LANES && lane < rest; lane++)
                if (digits[lane] < 256) sums[digits[lane]] += weights[lane];
        }
    });
    return 0;
}

// Makes distances of the rows' logits, and -inf of those beyond the row's cut, an order: what comes after it, and at it
// all but the first so many (quotas). Where the largest logit is NaN or infinite, no number is left.
struct Cut {
    Range range;
    int64_t cuts, quotas;
};

EXPORT int64_t quadriga_cut(const int64_t* arguments, Member* member) {
    const Cut& c = *(const Cut*)arguments;
    each_row(c.range, member, [&](int64_t row, float* logits, float top) {
        const int32_t cut = ((const int32_t*)c.cuts)[row];
        int64_t quota = ((const int64_t*)c.quotas)[row];
        for (int64_t i = 0; i < c.range.count; i += LANES) {
            const int64_t rest = c.range.count - i;
            const floats below = load(logits + i, rest) - top;
            const ints order = order_of(below), is_at = order == cut;
            ints is_out = order > cut;
            if (any(is_at))
                for (int lane = 0; lane < LANES && lane < rest; lane++)
                    if (is_at[lane] && quota-- <= 0) is_out[lane] = -1;
            store(logits + i, is_out ? spread(-INFINITY) : below, rest);
        }
    });
    return 0;
}

// keys [rows, width]: of the nearest tokens, as keys.py makes them, the highest first, then `lowest`.
struct Nearest {
    Range range;
    int64_t first_id, width, keys, lowest;
};

static void keep_highest(std::vector<int64_t>& keys, size_t width) {
    if (keys.size() <= width) return;
    std::nth_element(keys.begin(), keys.begin() + width - 1, keys.end(), std::greater<>());
    keys.resize(width);
}

EXPORT int64_t quadriga_nearest(const int64_t* arguments, Member* member) {
    const Nearest& n = *(const Nearest*)arguments;
    each_row(n.range, member, [&](int64_t row, const float* logits, float top) {
        static thread_local std::vector<int64_t> keys;
        keys.clear();
        const size_t room = std::max<size_t>(4 * n.width, 1024);
        int32_t furthest = INT32_MAX;  // so many are as near or nearer
        for (int64_t i = 0; i < n.range.count; i += LANES) {
            const int64_t rest = n.range.count - i;
            const ints order = order_of(load(logits + i, rest) - top);
            if (!any(order <= furthest)) continue;
            for (int lane = 0; lane < LANES && lane < rest; lane++)
                if (order[lane] <= furthest)
                    keys.push_back(-(int64_t)order[lane] - (order[lane] > 0) << 32 | 0xffffffff - (n.first_id + i + lane));
            if (keys.size() < room) continue;
            keep_highest(keys, n.width);
            furthest = -(keys.back() >> 32) - (keys.back() < 0);
        }
        keep_highest(keys, n.width);
        std::sort(keys.begin(), keys.end(), std::greater<>());
        keys.resize(n.width, n.lowest);
        std::copy(keys.begin(), keys.end(), (int64_t*)n.keys + row * n.width);
    });
    return 0;
}

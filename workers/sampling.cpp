// The largest logit of a row, and the few tokens of a row that can win once noise is added.
//
// A token's score is logit + T g with Gumbel noise g = -log(-log u), where u is a hash of the row's keys and the token's
// id (sampler.py). Two logarithms for every token of the vocabulary are most of the work, and nearly all tokens lose by
// far. To beat a score B a token needs g > t = (B - logit) / T, that is -log u < exp(-t); and since 1 - u <= -log u, one
// whose 1 - u is not below exp(-t) cannot win. What is left, a few tokens a row, is scored exactly by the caller.
#include "../attention/vector.h"

struct Best {
    int64_t threads, rows, count, logits, values, ids;
};

// Of equals, the lowest; -1 where there is NaN or an infinity above all.
static int64_t find_best(const float* logits, int64_t count) {
    ints sound = (ints)spread(0) == 0;
    floats best = spread(-INFINITY);
    words number = lane_numbers(), place = number;
    for (int64_t i = 0; i < count; i += LANES, number += LANES) {
        floats x = i + LANES <= count ? load(logits + i) : load(logits + i, count - i);
        ints is_real = (ints)number < (int32_t)count;
        ints is_larger = (x > best) & is_real;
        sound &= (x < spread(INFINITY)) | ~is_real;
        best = is_larger ? x : best;
        place = is_larger ? number : place;
    }
    int64_t winner = 0;
    float largest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        if (best[lane] > largest || (best[lane] == largest && best[lane] > -INFINITY && place[lane] < winner)) {
            largest = best[lane];
            winner = place[lane];
        }
    for (int lane = 0; lane < LANES; lane++)
        if (!sound[lane]) return -1;
    return winner;
}

// logits [rows, count] -> values, ids [rows]; NaN and 0 for a row that is not sound.
EXPORT int64_t quadriga_best(const int64_t* arguments, Member* member) {
    const Best& b = *(const Best*)arguments;
    parallel_each(member, b.rows * b.count < 1 << 16 ? 1 : b.threads, b.rows, [&](int64_t row) {
        const float* logits = (const float*)b.logits + row * b.count;
        const int64_t id = find_best(logits, b.count);
        ((int64_t*)b.ids)[row] = std::max<int64_t>(id, 0);
        ((float*)b.values)[row] = id < 0 ? NAN : logits[id];
    });
    return 0;
}

// chosen [chosen_count]: rows of logits [.., count]; high, low, temperatures: their keys and T. first_id: of the logits.
// ids [chosen_count, most] gets each row's candidates in ascending order, then their first one again; counts how many
// there are, or -1 when they are more than `most`. Ids count from 0 within the logits.
struct Candidates {
    int64_t threads, chosen_count, chosen, count, first_id, logits, high, low, temperatures, most, ids, counts;
};

static inline words mix(words x) {  // "lowbias32" (C. Wellons, hash-prospector)
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

class Row {
public:
    Row(const Candidates& c, int64_t i)
        : c(c),
          logits((const float*)c.logits + ((const int64_t*)c.chosen)[i] * c.count),
          high((uint32_t)((const int64_t*)c.high)[i]),
          low((uint32_t)((const int64_t*)c.low)[i]),
          temperature(((const float*)c.temperatures)[i]),
          found((int64_t*)c.ids + i * c.most) {}

    // How many candidates were found.
    int64_t find() {
        const int64_t greedy = find_best(logits, c.count);
        raise_bound(greedy, hash(words{} + (uint32_t)greedy)[0]);
        for (int64_t i = 0; i < c.count; i += LANES) {
            const words x = hash(lane_numbers() + (uint32_t)i);
            const floats lead = (bound - load(logits + i, c.count - i)) / temperature;
            const floats rest = __builtin_convertvector(~x, floats) * 0x1p-32f;  // 1 - u, or a little less
            // What cannot be told stays in: NaN fails every comparison.
            const ints is_out = rest > exponential(-lead) * 1.0001f;
            for (int lane = 0; lane < LANES && i + lane < c.count; lane++) {
                if (is_out[lane] && i + lane != greedy) continue;
                if (total == c.most) return -1;
                found[total++] = i + lane;
                raise_bound(i + lane, x[lane]);
            }
        }
        std::fill(found + total, found + c.most, found[0]);
        return total;
    }

private:
    const Candidates& c;
    const float* logits;
    const uint32_t high, low;
    const float temperature;
    int64_t* found;
    int64_t total = 0;
    float bound = -INFINITY;  // some token scores at least this

    words hash(words id) const { return mix(mix((id + (uint32_t)c.first_id) * 0x9e3779b1u + high) ^ low); }

    // By less than the token's score, so that no rounding of the caller's turns a winner away.
    void raise_bound(int64_t id, uint32_t x) {
        const double noise = -std::log(-std::log((x + 0.5) * 0x1p-32)), score = logits[id] + temperature * noise;
        bound = std::max(bound, (float)(score - 4e-6 * (std::abs(score) + 50 * temperature)));
    }
};

EXPORT int64_t quadriga_candidates(const int64_t* arguments, Member* member) {
    const Candidates& c = *(const Candidates*)arguments;
    parallel_each(member, c.threads, c.chosen_count, [&](int64_t i) { ((int64_t*)c.counts)[i] = Row(c, i).find(); });
    return 0;
}

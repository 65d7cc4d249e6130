// The small operations between the large ones.
#include "../attention/vector.h"

// Numbers; below, a second thread costs more than it brings: to wake it, or in a team, whose threads are awake, to wait for.
constexpr int64_t SMALL = 1 << 15, SMALL_IN_TEAM = 1 << 12;

static int64_t threads_for(const Member* member, int64_t threads, int64_t numbers) {
    return numbers < (member ? SMALL_IN_TEAM : SMALL) ? 1 : threads;
}

// Root mean square normalisation of rows of `size` numbers: `inner` rows lie side by side, `outer` groups of them lie
// `stride` numbers apart. With `delta`, x becomes x + delta first (then inner is 1 and rows are dense).
struct Norm {
    int64_t format, threads, outer, inner, size, x, stride, delta, weight, eps_bits, out;
};

template <class T>
static void norm_row(T* x, const T* delta, const T* weight, float eps, int64_t size, T* out) {
    floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        floats v = load(x + i, size - i);
        if (delta) {
            v = rounded<T>(v + load(delta + i, size - i));  // as the next layers will see it
            store(x + i, v, size - i);
        }
        squares += v * v;
    }
    const float factor = 1.f / std::sqrt(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(out + i, rounded<T>(load(x + i, size - i) * factor) * load(weight + i, size - i), size - i);
}

EXPORT int64_t quadriga_norm(const int64_t* arguments, Member* member) {
    const Norm& n = *(const Norm*)arguments;
    double eps;
    memcpy(&eps, &n.eps_bits, sizeof eps);
    with_format(n.format, [&](auto number) {
        using T = decltype(number);
        const int64_t threads = threads_for(member, n.threads, n.outer * n.inner * n.size);
        parallel_ranges(member, threads, n.outer * n.inner, [&](int64_t first, int64_t stop) {
            for (int64_t row = first; row < stop; row++) {
                T* x = (T*)n.x + row / n.inner * n.stride + row % n.inner * n.size;
                const T* delta = n.delta ? (const T*)n.delta + row * n.size : nullptr;
                norm_row(x, delta, (const T*)n.weight, (float)eps, n.size, (T*)n.out + row * n.size);
            }
        });
    });
    return 0;
}

// Rotates queries in place, and keys on their way to the cache; values go along.
// query, key, value: [tokens, heads, size], tokens `..._stride` numbers apart; cos, sin: [tokens, size].
struct Rotate {
    int64_t format, threads, tokens, size, cos, sin, angle_stride;
    int64_t query, query_stride, query_heads, key, key_stride, value, value_stride, kv_heads;
    int64_t slots, key_pages, value_pages;
};

template <class T>
static void rotate_head(const T* x, const T* cos, const T* sin, int64_t size, T* out) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t count = half - i;
        const floats a = load(x + i, count), b = load(x + half + i, count);
        store(out + i, a * load(cos + i, count) - b * load(sin + i, count), count);
        store(out + half + i, b * load(cos + half + i, count) + a * load(sin + half + i, count), count);
    }
}

EXPORT int64_t quadriga_rotate(const int64_t* arguments, Member* member) {
    const Rotate& r = *(const Rotate*)arguments;
    with_format(r.format, [&](auto number) {
        using T = decltype(number);
        const int64_t width = r.kv_heads * r.size;
        const int64_t threads = threads_for(member, r.threads, r.tokens * r.size * (r.query_heads + 2 * r.kv_heads));
        parallel_ranges(member, threads, r.tokens, [&](int64_t first, int64_t stop) {
            for (int64_t token = first; token < stop; token++) {
                const T* cos = (const T*)r.cos + token * r.angle_stride;
                const T* sin = (const T*)r.sin + token * r.angle_stride;
                const int64_t place = ((const int64_t*)r.slots)[token] * width;
                for (int64_t head = 0; head < r.query_heads; head++) {
                    T* query = (T*)r.query + token * r.query_stride + head * r.size;
                    rotate_head(query, cos, sin, r.size, query);
                }
                for (int64_t head = 0; head < r.kv_heads; head++) {
                    const T* key = (const T*)r.key + token * r.key_stride + head * r.size;
                    rotate_head(key, cos, sin, r.size, (T*)r.key_pages + place + head * r.size);
                }
                const T* value = (const T*)r.value + token * r.value_stride;
                memcpy((T*)r.value_pages + place, value, width * sizeof(T));
            }
        });
    });
    return 0;
}

// gate_up [rows, 2 size] -> out [rows, size]: SiLU of the first half times the second.
struct Gate {
    int64_t format, threads, rows, size, gate_up, out;
};

EXPORT int64_t quadriga_gate(const int64_t* arguments, Member* member) {
    const Gate& g = *(const Gate*)arguments;
    with_format(g.format, [&](auto number) {
        using T = decltype(number);
        parallel_ranges(member, threads_for(member, g.threads, g.rows * g.size), g.rows, [&](int64_t first, int64_t stop) {
            for (int64_t row = first; row < stop; row++) {
                const T* gate = (const T*)g.gate_up + row * 2 * g.size;
                for (int64_t i = 0; i < g.size; i += LANES) {
                    const floats x = load(gate + i, g.size - i), up = load(gate + g.size + i, g.size - i);
                    store((T*)g.out + row * g.size + i, silu(x) * up, g.size - i);
                }
            }
        });
    });
    return 0;
}

// Rows `ids` of a table.
struct Gather {
    int64_t table, row_bytes, ids, count, out;
};

EXPORT int64_t quadriga_gather(const int64_t* arguments, Member* member) {
    const Gather& g = *(const Gather*)arguments;
    parallel_each(member, 1, 1, [&](int64_t) {
        for (int64_t i = 0; i < g.count; i++) {
            const char* row = (const char*)g.table + ((const int64_t*)g.ids)[i] * g.row_bytes;
            memcpy((char*)g.out + i * g.row_bytes, row, g.row_bytes);
        }
    });
    return 0;
}

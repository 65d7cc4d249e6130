// Linear layers over packed weights.
//
// A weight [outputs, depth] lies in panels of COLUMNS outputs, so that both one row and many rows read it from front to
// back; a single copy serves every number of rows, and embedding lookups too:
//
//     [panel][depth][COLUMNS]             or, where the machine multiplies pairs of bf16,
//     [panel][depth / 2][COLUMNS][2]
//
// What pads outputs and depth is zero. Every sum runs over depth in order, so that a row's result does not depend on
// the rows beside it.
#include "../attention/vector.h"

constexpr int64_t BLOCK_ROWS = 96, BLOCK_DEPTH = 1024;  // keep the sums in the first, the panel in the second cache

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

template <class T>
static int64_t packed_depth(int64_t depth) {
    return (depth + UNIT<T> - 1) / UNIT<T> * UNIT<T>;
}

template <class T>
static T* place(T* packed, int64_t output, int64_t column, int64_t depth) {
    const int64_t panel = output / COLUMNS * packed_depth<T>(depth) * COLUMNS;
    return packed + panel + (column / UNIT<T> * COLUMNS + output % COLUMNS) * UNIT<T> + column % UNIT<T>;
}

struct Pack {
    int64_t format, threads, weight, outputs, depth, packed;
};

template <class T>
static void pack(const Pack& p, Member* member) {
    const int64_t panels = (p.outputs + COLUMNS - 1) / COLUMNS, deep = packed_depth<T>(p.depth);
    parallel_ranges(member, p.threads, panels * COLUMNS, [&](int64_t first, int64_t stop) {
        for (int64_t output = first; output < stop; output++)
            for (int64_t column = 0; column < deep; column++) {
                const bool real = output < p.outputs && column < p.depth;
                *place((T*)p.packed, output, column, p.depth) =
                    real ? ((const T*)p.weight)[output * p.depth + column] : T{};
            }
    });
}

// Rows of the weight as they were before packing: ids [count] -> out [count, depth].
struct Lookup {
    int64_t format, threads, packed, first_id, outputs, depth, ids, count, out;
};

template <class T>
static void lookup(const Lookup& l, Member* member) {
    parallel_ranges(member, l.threads, l.count, [&](int64_t first, int64_t stop) {
        for (int64_t i = first; i < stop; i++) {
            const int64_t id = ((const int64_t*)l.ids)[i] - l.first_id;
            T* out = (T*)l.out + i * l.depth;
            for (int64_t column = 0; column < l.depth; column++)
                out[column] = id < 0 || id >= l.outputs ? T{} : *place((T*)l.packed, id, column, l.depth);
        }
    });
}

struct Multiply {
    int64_t format, threads, x, rows, depth, packed, outputs, bias, out, out_is_fp32;
};

template <class T>
class Product {
    using Left = std::conditional_t<PAIRS<T>, uint32_t, float>;
    using Right = std::conditional_t<PAIRS<T>, uint32_t, T>;

public:
    Product(const Multiply& multiply, Member* member)
        : m(multiply), member(member), steps(packed_depth<T>(m.depth) / UNIT<T>) {}

    void run() {
        x = prepare();
        const int64_t panels = (m.outputs + COLUMNS - 1) / COLUMNS, blocks = (m.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (m.rows <= ROWS)  // as fast as memory, best read from front to back
            return parallel_ranges(member, m.threads, panels, [&](int64_t first, int64_t stop) {
                for (int64_t panel = first; panel < stop; panel++) compute(panel, 0);
            });
        parallel_each(member, m.threads, panels * blocks, [&](int64_t i) { compute(i / blocks, i % blocks * BLOCK_ROWS); });
    }

private:
    const Multiply& m;
    Member* const member;
    const int64_t steps;
    const Left* x;

    // The rows as the products take them: as they are, or padded, or widened.
    const Left* prepare() {
        if (std::is_same_v<T, float> || (PAIRS<T> && m.depth % 2 == 0)) return (const Left*)m.x;
        return (const Left*)shared(member, m.rows * steps * sizeof(Left), [&](char* fresh) {
            for (int64_t row = 0; row < m.rows; row++)
                copy_row((const T*)m.x + row * m.depth, (Left*)fresh + row * steps);
        });
    }

    void copy_row(const T* from, Left* to) const {
        if constexpr (PAIRS<T>) {
            to[steps - 1] = 0;
            memcpy(to, from, m.depth * sizeof(T));
        } else {
            for (int64_t i = 0; i < m.depth; i++) to[i] = to_float(from[i]);
        }
    }

    void compute(int64_t panel, int64_t first_row) const {
        float sums[BLOCK_ROWS * COLUMNS];
        const int64_t rows = std::min(BLOCK_ROWS, m.rows - first_row);
        const Right* weight = (const Right*)m.packed + panel * steps * COLUMNS;
        for (int64_t k = 0; k == 0 || k < steps; k += BLOCK_DEPTH)
            product(x + first_row * steps + k, steps, weight + k * COLUMNS, COLUMNS, std::min(BLOCK_DEPTH, steps - k),
                    sums, COLUMNS, k > 0, rows);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t v = 0; v < COLUMNS; v += LANES) {
                const int64_t output = panel * COLUMNS + v, count = m.outputs - output;
                if (count <= 0) break;
                floats y = load(sums + row * COLUMNS + v);
                if (m.bias) y += load((const T*)m.bias + output, count);
                const int64_t to = (first_row + row) * m.outputs + output;
                m.out_is_fp32 ? store((float*)m.out + to, y, count) : store((T*)m.out + to, y, count);
            }
    }
};

EXPORT int64_t quadriga_pack(const int64_t* arguments, Member* member) {
    const Pack& p = *(const Pack*)arguments;
    with_format(p.format, [&](auto number) { pack<decltype(number)>(p, member); });
    return 0;
}

EXPORT int64_t quadriga_lookup(const int64_t* arguments, Member* member) {
    const Lookup& l = *(const Lookup*)arguments;
    with_format(l.format, [&](auto number) { lookup<decltype(number)>(l, member); });
    return 0;
}

EXPORT int64_t quadriga_multiply(const int64_t* arguments, Member* member) {
    const Multiply& m = *(const Multiply*)arguments;
    with_format(m.format, [&](auto number) { Product<decltype(number)>(m, member).run(); });
    return 0;
}

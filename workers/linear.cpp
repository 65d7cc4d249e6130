// Linear layers over packed weights, in the layouts of weights.h.
//
// What pads outputs and depth counts as zero. Every sum runs over depth in order, so that a row's result does not depend
// on the rows beside it.
#include "weights.h"

constexpr int64_t BLOCK_ROWS = 96, BLOCK_DEPTH = 1024;  // keep the sums in the first, the panel in the second cache
constexpr int64_t PAIR_ROWS = 2;  // of so few rows two panels are computed together, since sums wait for one another
constexpr int64_t TILE_DEPTH = 128;                     // so many steps of integers are made numbers of at once for many rows

// Of a weight. scales: none for plain numbers, [panels * COLUMNS] fp32 for int8, for int4 [panels, groups, 2, COLUMNS], scales
// and offsets, in bf16 or fp32.
struct Weight {
    int64_t bits, packed, outputs, depth, scales, group, begun, fp32_scales;

    Groups groups() const { return {group, begun}; }
    int64_t panels() const { return (outputs + COLUMNS - 1) / COLUMNS; }

    // A group begins with a step of its own: where it would not, a number is put before the first.
    template <class T>
    int64_t lead() const {
        return bits == 4 ? begun % UNIT<T> : 0;
    }
    template <class T>
    int64_t steps() const {
        return (lead<T>() + depth + UNIT<T> - 1) / UNIT<T>;
    }
    template <class T, class Layout>
    char* step(int64_t output, int64_t column) const {
        return (char*)packed + (output / COLUMNS * steps<T>() + (lead<T>() + column) / UNIT<T>) * Layout::BYTES;
    }
    template <class T>
    int64_t index(int64_t output, int64_t column) const {
        return output % COLUMNS * UNIT<T> + (lead<T>() + column) % UNIT<T>;
    }
    template <class S>
    const S* group_scales(int64_t panel, int64_t number) const {
        return (const S*)scales + (panel * groups().count(depth) + number) * 2 * COLUMNS;
    }
};

struct Pack {
    int64_t format, threads, numbers;
    Weight to;
};

template <class T, class Layout>
static void pack(const Pack& p, Member* member) {
    using Number = typename Layout::Number;
    const Weight& w = p.to;
    const int64_t panel_bytes = w.steps<T>() * Layout::BYTES;
    parallel_ranges(member, p.threads, w.panels(), [&](int64_t first, int64_t stop) {
        memset((char*)w.packed + first * panel_bytes, 0, (stop - first) * panel_bytes);
        for (int64_t output = first * COLUMNS; output < std::min(stop * COLUMNS, w.outputs); output++)
            for (int64_t column = 0; column < w.depth; column++)
                Layout::put(w.step<T, Layout>(output, column), w.index<T>(output, column),
                            ((const Number*)p.numbers)[output * w.depth + column]);
    });
}

// Rows of the weight as they were before packing: ids [count] -> out [count, depth].
struct Lookup {
    int64_t format, threads, first_id, ids, count, out;
    Weight from;
};

template <class T, class Layout>
static void lookup(const Lookup& l, Member* member) {
    const Weight& w = l.from;
    const auto number = [&](int64_t id, int64_t column) {
        const float y = Layout::get(w.step<T, Layout>(id, column), w.index<T>(id, column));
        if constexpr (Layout::GROUPS) {
            using S = typename Layout::Scale;
            const S* scale = w.group_scales<S>(id / COLUMNS, w.groups().of(column)) + id % COLUMNS;
            return to_float(scale[0]) * y + to_float(scale[COLUMNS]);
        }
        return Layout::INTEGERS ? ((const float*)w.scales)[id] * y : y;
    };
    parallel_ranges(member, l.threads, l.count, [&](int64_t first, int64_t stop) {
        for (int64_t i = first; i < stop; i++) {
            const int64_t id = ((const int64_t*)l.ids)[i] - l.first_id;
            T* out = (T*)l.out + i * w.depth;
            for (int64_t column = 0; column < w.depth; column += LANES) {
                const int64_t count = std::min<int64_t>(LANES, w.depth - column);
                float part[LANES] = {};
                for (int64_t j = 0; j < count && id >= 0 && id < w.outputs; j++) part[j] = number(id, column + j);
                store(out + column, load(part), count);
            }
        }
    });
}

// The panel that is computed next. A step asks for one of its lines, lest it comes from memory when all wait for it.
struct Next {
    const char *at, *end;

    void ask() {
        __builtin_prefetch(at, 0, 2);
        at += at < end ? LINE : 0;
    }
};

// gated: the first half of the outputs are gates of the second, and out [rows, outputs / 2] is SiLU(gate) * what it lets
// through; the halves are whole panels.
struct Multiply {
    int64_t format, threads, x, rows, bias, out, out_is_fp32, gated;
    Weight weight;
};

template <class T, class Layout>
class Product {
    using Left = std::conditional_t<PAIRS<T>, uint32_t, float>;

public:
    Product(const Multiply& multiply, Member* member)
        : m(multiply), w(m.weight), member(member), steps(w.steps<T>()), lead(w.lead<T>()) {}

    void run() {
        x = prepare();
        const int64_t panels = m.gated ? w.panels() / 2 : w.panels(), blocks = (m.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (m.rows <= ROWS)  // as fast as memory, best read from front to back
            return parallel_ranges(member, m.threads, panels, [&](int64_t first, int64_t stop) {
                const int64_t pairs = m.rows <= PAIR_ROWS && !m.gated ? (stop - first) / 2 : 0;
                for (int64_t i = 0; i < pairs; i++) compute_pair(first + i, first + pairs + i);
                for (int64_t panel = first + 2 * pairs; panel < stop; panel++) compute(panel, panels, 0);
            });
        parallel_each(member, m.threads, panels * blocks, [&](int64_t i) {
            compute(i % panels, panels, i / panels * BLOCK_ROWS);
        });
    }

private:
    const Multiply& m;
    const Weight& w;
    Member* const member;
    const int64_t steps, lead;
    const Left* x;

    // The rows as the products take them: as they are, or padded, or widened.
    const Left* prepare() {
        if (std::is_same_v<T, float> || (PAIRS<T> && w.depth == steps * 2)) return (const Left*)m.x;
        return (const Left*)shared(member, m.rows * steps * sizeof(Left), [&](char* fresh) {
            for (int64_t row = 0; row < m.rows; row++)
                copy_row((const T*)m.x + row * w.depth, (Left*)fresh + row * steps);
        });
    }

    void copy_row(const T* from, Left* to) const {
        if constexpr (PAIRS<T>) {
            if (steps) to[0] = to[steps - 1] = 0;
            memcpy((T*)to + lead, from, w.depth * sizeof(T));
        } else {
            for (int64_t i = 0; i < w.depth; i++) to[i] = to_float(from[i]);
        }
    }

    // The outputs of one panel of `panels` for a block of rows, or where they are gated, of that and its counterpart.
    void compute(int64_t panel, int64_t panels, int64_t first_row) const {
        float sums[BLOCK_ROWS * COLUMNS], gated[BLOCK_ROWS * COLUMNS];
        const int64_t rows = std::min(BLOCK_ROWS, m.rows - first_row), next = (panel + m.threads) % panels;
        if (!m.gated) {
            multiply<1>(panel, panel, next, first_row, rows, sums);
            return put(panel, first_row, rows, sums, COLUMNS);
        }
        if (rows <= PAIR_ROWS) {
            multiply<2>(panel, panel + panels, next, first_row, rows, sums);
            return put_gated(panel, first_row, rows, sums, sums + COLUMNS, 2 * COLUMNS);
        }
        multiply<1>(panel, panel, panel + panels, first_row, rows, sums);
        multiply<1>(panel + panels, panel + panels, next, first_row, rows, gated);
        put_gated(panel, first_row, rows, sums, gated, COLUMNS);
    }

    // Two panels of few rows.
    void compute_pair(int64_t panel, int64_t second) const {
        float sums[PAIR_ROWS * 2 * COLUMNS];
        multiply<2>(panel, second, panel, 0, m.rows, sums);
        put(panel, 0, m.rows, sums, 2 * COLUMNS);
        put(second, 0, m.rows, sums + COLUMNS, 2 * COLUMNS);
    }

    // sums [rows, PANELS * COLUMNS] of one panel or two. next: the panel that comes after, if the threads keep pace.
    template <int PANELS>
    void multiply(int64_t panel, int64_t second, int64_t next, int64_t first_row, int64_t rows, float* sums) const {
        constexpr int64_t WIDTH = PANELS * COLUMNS;
        Next after = lines_of(next);
        int64_t k = 0, stop;
        do {  // once even without depth, for the zeros
            const Left* left = x + first_row * steps + k;
            if constexpr (Layout::INTEGERS)
                if (rows > Layout::FEW) {
                    alignas(64) Left tile[TILE_DEPTH * COLUMNS];
                    stop = std::min(steps, k + TILE_DEPTH);
                    fill(panel, k, stop, tile);
                    product(left, steps, (const Left*)tile, COLUMNS, stop - k, sums, COLUMNS, k > 0, rows);
                    k = stop;
                    continue;
                }
            stop = end(k);
            with_reader<PANELS>(panel, second, k, [&](auto reader) {
                if constexpr (PANELS == 1 && !Layout::INTEGERS)
                    if (rows > ROWS) {
                        const Asking<typename Layout::Element, Next> asking{reader, &after};
                        return product(left, steps, asking, Layout::STRIDE, stop - k, sums, WIDTH, k > 0, rows);
                    }
                product<PANELS>(left, steps, reader, Layout::STRIDE, stop - k, sums, WIDTH, k > 0, rows);
            });
            k = stop;
        } while (k < steps);
    }

    Next lines_of(int64_t panel) const {
        const int64_t bytes = steps * Layout::BYTES;
        const char* begin = (const char*)w.packed + panel * bytes;
        return {begin, begin + bytes};
    }

    // The outputs from `output` on, of their sums.
    floats finished(const float* sums, int64_t output) const {
        floats y = load(sums);
        if (Layout::INTEGERS && !Layout::GROUPS) y *= load((const float*)w.scales + output);
        if (m.bias) y += load((const T*)m.bias + output, w.outputs - output);
        return y;
    }

    void put(int64_t panel, int64_t first_row, int64_t rows, const float* sums, int64_t stride) const {
        for (int64_t row = 0; row < rows; row++)
            for (int64_t v = 0; v < COLUMNS; v += LANES) {
                const int64_t output = panel * COLUMNS + v, count = w.outputs - output;
                if (count <= 0) continue;
                const floats y = finished(sums + row * stride + v, output);
                const int64_t to = (first_row + row) * w.outputs + output;
                m.out_is_fp32 ? store((float*)m.out + to, y, count) : store((T*)m.out + to, y, count);
            }
    }

    void put_gated(int64_t panel, int64_t first_row, int64_t rows, const float* gates, const float* sums, int64_t stride) const {
        const int64_t outputs = w.outputs / 2;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t v = 0; v < COLUMNS; v += LANES) {
                const int64_t output = panel * COLUMNS + v;
                const floats gate = rounded<T>(finished(gates + row * stride + v, output));
                const floats up = rounded<T>(finished(sums + row * stride + v, outputs + output));
                store((T*)m.out + (first_row + row) * outputs + output, silu(gate) * up);
            }
    }

    // Where what is read in one go ends that begins with step k.
    int64_t end(int64_t k) const {
        if constexpr (Layout::GROUPS) return std::min(steps, ((number(k) + 1) * w.group - w.begun + lead) / UNIT<T>);
        return Layout::INTEGERS ? steps : std::min(steps, k + BLOCK_DEPTH);
    }

    int64_t number(int64_t k) const { return w.groups().of(k * UNIT<T> - lead); }

    template <int PANELS, class Body>
    void with_reader(int64_t panel, int64_t second, int64_t k, Body&& body) const {
        if constexpr (PANELS == 1)
            read(panel, k, body);
        else
            read(panel, k, [&](auto left) {
                read(second, k, [&](auto right) { body(SideBySide<decltype(left)>{left, right}); });
            });
    }

    template <class Body>
    void read(int64_t panel, int64_t k, Body&& body) const {
        const char* step = (const char*)w.packed + (panel * steps + k) * Layout::BYTES;
        if constexpr (Layout::GROUPS) {
            const Scales<UNIT<T>> scales(w.group_scales<typename Layout::Scale>(panel, steps ? number(k) : 0));
            body(Layout::reader(step, scales));
        } else {
            body(Layout::reader(step));
        }
    }

    // The panel's steps from k to stop as numbers.
    void fill(int64_t panel, int64_t k, int64_t stop, Left* tile) const {
        for (int64_t next; k < stop; k = next) {
            next = std::min(stop, end(k));
            read(panel, k, [&](auto reader) {
                for (int64_t i = k; i < next; i++, reader += Layout::STRIDE) {
                    look_ahead(reader);
                    for (int64_t v = 0; v < COLUMNS; v += LANES, tile += LANES) {
                        const auto numbers = take(reader + v);
                        memcpy(tile, &numbers, sizeof numbers);
                    }
                }
            });
        }
    }
};

template <class Body>
static void with_format_and_layout(int64_t format, const Weight& w, Body&& body) {
    with_format(format, [&](auto number) {
        with_layout<decltype(number)>(w.bits, w.fp32_scales, [&](auto layout) { body(number, layout); });
    });
}

EXPORT int64_t quadriga_pack(const int64_t* arguments, Member* member) {
    const Pack& p = *(const Pack*)arguments;
    with_format_and_layout(p.format, p.to, [&](auto number, auto layout) {
        pack<decltype(number), decltype(layout)>(p, member);
    });
    return 0;
}

EXPORT int64_t quadriga_lookup(const int64_t* arguments, Member* member) {
    const Lookup& l = *(const Lookup*)arguments;
    with_format_and_layout(l.format, l.from, [&](auto number, auto layout) {
        lookup<decltype(number), decltype(layout)>(l, member);
    });
    return 0;
}

EXPORT int64_t quadriga_multiply(const int64_t* arguments, Member* member) {
    const Multiply& m = *(const Multiply*)arguments;
    with_format_and_layout(m.format, m.weight, [&](auto number, auto layout) {
        Product<decltype(number), decltype(layout)>(m, member).run();
    });
    return 0;
}

// Attention over the paged cache: one call for the whole mixed batch.
//
// A unit of work is a tile of one request's queries, all query heads of some key/value heads, and a span of keys:
//
//     rows of the unit    q0h0 q0h1 q0h2 q1h0 q1h1 q1h2 ...     (so that keys and values are read once for the group)
//     keys of the unit    walked in tiles of KEYS, with a running maximum and sum for each row (online softmax)
//
// A row's context is cut into spans of SPAN keys, whose results are merged in order. Those of a single query may be units
// of their own, which any threads compute; who finishes last merges. Tiles and spans depend on positions alone and every
// sum has one order, so that a row's result is the same to the bit whatever threads, neighbours and chunks there are.
#include "softmax.h"

constexpr int SPAN = 256, MOST_ROWS = 96;
constexpr int64_t TILE_BYTES = 64 << 10;  // at most, of the keys and values of a unit with several heads
constexpr int FEW_ROWS = 6;  // up to here, values are used where they lie rather than widened first

struct Arguments {
    int64_t format, threads;
    int64_t query, query_stride, out, key_pages, value_pages;
    int64_t block_size, kv_heads, group, head_dim, scale_bits, window;  // window: 0 for none
    int64_t chunks, starts, chunk_contexts, chunk_blocks, chunk_width;
    int64_t decodes, decode_contexts, decode_blocks, decode_width;
};

// One request's queries in this step: `token` is the first of them in the batch.
struct Request {
    int64_t token, queries, context;
    const int32_t* blocks;
};

// Spans of one context leave their partial results at `partial` and on, those of a head side by side; a whole context has
// one span.
struct Unit {
    const Request* request;
    int64_t query, queries, head, heads, first_key, end_key;
    int64_t partial, span, spans;
};

// What a unit knows of one head: the queries, widened or as pairs, and what has become of the span and of those before it.
struct Head {
    int64_t number;
    Running now;
    float *query, *merged;
    uint32_t* pairs;
};

struct Memory {
    std::vector<float> query, keys, values, scores, sums, top, total, fades, merged;
    std::vector<uint32_t> pairs, transposed, paired;
    Ahead ahead;
};

template <class T>
class Attention {
public:
    Attention(const Arguments& arguments, Member* member)
        : a(arguments), member(member), dim(a.head_dim), padded((dim + COLUMNS - 1) / COLUMNS * COLUMNS), wide(padded + 2) {
        double exact;
        memcpy(&exact, &a.scale_bits, sizeof exact);
        scale = (float)exact;
    }

    void run() {
        list_requests();
        whole = longest_whole();
        for (const Request& request : requests) list_units(request);
        const size_t counters = num_partials * sizeof(std::atomic<int64_t>);
        char* memory = shared(member, counters + num_partials * a.group * wide * sizeof(float), [&](char* fresh) {
            auto counts = (std::atomic<int64_t>*)fresh;
            for (const Unit& unit : units)
                if (unit.spans > 1) counts[unit.partial] = unit.spans;
        });
        waiting = (std::atomic<int64_t>*)memory;
        partials = (float*)(memory + counters);
        const int64_t count = units.size();
        parallel_each(member, a.threads, count, [&](int64_t i) { compute(units[i], units[std::min(i + a.threads, count - 1)]); });
    }

private:
    // Where the machine multiplies pairs of bf16, scores come from queries and keys as they are.
#if defined(BF16_PAIRS)
    static constexpr bool PAIRS = std::is_same_v<T, bf16>;
#else
    static constexpr bool PAIRS = false;
#endif
#if defined(WIDE)
    static constexpr bool WORDS = PAIRS || std::is_same_v<T, float>;  // keys can be transposed where they lie
#else
    static constexpr bool WORDS = false;
#endif
    const Arguments& a;
    Member* const member;
    const int64_t dim, padded, wide;
    float scale;
    std::vector<Request> requests;
    std::vector<Unit> units;
    int64_t num_partials = 0, whole = 0;
    float* partials = nullptr;
    std::atomic<int64_t>* waiting = nullptr;  // spans of a context that are not computed yet

    void list_requests() {
        auto starts = (const int32_t*)a.starts, contexts = (const int32_t*)a.chunk_contexts;
        for (int64_t i = 0; i < a.chunks; i++) {
            auto blocks = (const int32_t*)a.chunk_blocks + i * a.chunk_width;
            requests.push_back({starts[i], starts[i + 1] - starts[i], contexts[i], blocks});
        }
        const int64_t first = a.chunks ? starts[a.chunks] : 0;
        contexts = (const int32_t*)a.decode_contexts;
        for (int64_t i = 0; i < a.decodes; i++)
            requests.push_back({first + i, 1, contexts[i], (const int32_t*)a.decode_blocks + i * a.decode_width});
    }

    void list_units(const Request& request) {
        const int64_t most = std::max<int64_t>(1, MOST_ROWS / a.group);
        // The last tiles see the most keys; whoever begins with them ends evenly.
        for (int64_t tile = (request.queries - 1) / most; tile >= 0; tile--) {
            const int64_t query = tile * most, queries = std::min(most, request.queries - query);
            const int64_t position = request.context - request.queries + query;
            const int64_t first = a.window ? std::max<int64_t>(0, position - a.window + 1) / KEYS * KEYS : 0;
            const int64_t end = position + queries, span = queries > 1 || end <= whole ? end : SPAN;
            const int64_t first_span = first / span, spans = (end - 1) / span - first_span + 1;
            const int64_t together = queries == 1 ? heads_together() : 1;
            for (int64_t head = 0; head < a.kv_heads; head += together) {
                const int64_t heads = std::min(together, a.kv_heads - head);
                for (int64_t i = 0; i < spans; i++) {
                    const int64_t from = std::max(first, (first_span + i) * span);
                    const int64_t to = std::min(end, (first_span + i + 1) * span);
                    units.push_back({&request, query, queries, head, heads, from, to, num_partials, i, spans});
                }
                num_partials += spans > 1 ? spans * heads : 0;
            }
        }
    }

    // Contexts of single queries up to this length are not cut, since there are others for all threads.
    int64_t longest_whole() const {
        int64_t keys = 0;
        for (const Request& request : requests) keys += request.queries == 1 ? request.context : 0;
        return keys / (4 * a.threads);
    }

    // Keys and values of neighbouring heads lie side by side, and are best read by one thread and in one go. Where few
    // streams decode there would be too few units to go round.
    int64_t heads_together() const {
        if (a.decodes < 4 * a.threads) return 1;
        return std::max<int64_t>(1, TILE_BYTES / (2 * KEYS * dim * sizeof(T)));
    }

    int64_t rows_of(const Unit& unit) const { return unit.queries * a.group; }
    int64_t position_of(const Unit& unit, int64_t row) const {
        return unit.request->context - unit.request->queries + unit.query + row / a.group;
    }
    const T* query_of(const Unit& unit, int64_t head, int64_t row) const {
        const int64_t token = unit.request->token + unit.query + row / a.group;
        return (const T*)a.query + token * a.query_stride + (head * a.group + row % a.group) * dim;
    }
    T* out_of(const Unit& unit, int64_t head, int64_t row) const {
        const int64_t token = unit.request->token + unit.query + row / a.group;
        return (T*)a.out + ((token * a.kv_heads + head) * a.group + row % a.group) * dim;
    }
    // body(i, count, entry): keys first + i and on, `count` of them in one block, the first of them at pages + entry.
    template <class Body>
    void each_run(const Unit& unit, int64_t head, int64_t first, int64_t keys, Body&& body) const {
        for (int64_t i = 0, count; i < keys; i += count) {
            const int64_t block = (first + i) / a.block_size, offset = (first + i) % a.block_size;
            const int64_t slot = unit.request->blocks[block] * a.block_size + offset;
            count = std::min(keys - i, a.block_size - offset);
            body(i, count, (slot * a.kv_heads + head) * dim);
        }
    }

    // Widens `dim` numbers; what pads them is zero.
    void widen(const T* from, float* to) const {
        for (int64_t d = 0; d < padded; d += LANES) store(to + d, d < dim ? load(from + d, dim - d) : floats{});
    }

    void pad(const T* from, void* to) const {
        memcpy(to, from, dim * sizeof(T));
        memset((T*)to + dim, 0, (padded - dim) * sizeof(T));
    }

    // next: the unit that this thread computes after this one, if the threads keep pace.
    void compute(const Unit& unit, const Unit& next) {
        static thread_local Memory memory;
        reserve(unit, memory);
        const int64_t rows = rows_of(unit);
        for (int64_t i = 0; i < unit.heads; i++) begin(unit, head_of(unit, i, memory));
        for (int64_t first = unit.first_key; first < unit.end_key; first += KEYS) {
            const int64_t keys = std::min<int64_t>(KEYS, unit.end_key - first);
            const bool last = first + KEYS >= unit.end_key;
            list_ahead(last ? next : unit, last ? next.first_key : first + KEYS, memory.ahead);
            for (int64_t i = 0; i < unit.heads; i++) {
                const Head head = head_of(unit, i, memory);
                if (first % SPAN == 0 || first == unit.first_key) head.now.clear(rows, padded);
                score(unit, head, first, keys, memory);
                soften<PAIRS>(memory.scores.data(), rows, scale, first, head.now, padded, memory.fades, [&](int64_t r) {
                    const int64_t position = position_of(unit, r);
                    return std::pair(a.window ? position - a.window + 1 : 0, std::min(position + 1, unit.end_key));
                });
                if constexpr (PAIRS)
                    sum_pairs(unit, head, first, keys, memory);
                else if (rows <= FEW_ROWS && dim == padded)
                    sum_few(unit, head, first, keys, memory);
                else
                    sum_many(unit, head, first, keys, memory);
                if ((first + KEYS) % SPAN == 0 || last)
                    for (int64_t r = 0; r < rows; r++)
                        merge_span(head.merged + r * wide, head.now.top[r], head.now.total[r], head.now.sums + r * padded, padded);
            }
        }
        finish(unit, memory);
    }

    void reserve(const Unit& unit, Memory& memory) const {
        const int64_t rows = rows_of(unit), all = rows * unit.heads;
        scratch(memory.query, all * padded);
        scratch(memory.pairs, all * padded / 2);
        scratch(memory.sums, all * padded);
        scratch(memory.top, all);
        scratch(memory.total, all);
        scratch(memory.merged, all * wide);
        scratch(memory.keys, KEYS * padded);
        scratch(memory.values, KEYS * padded);
        scratch(memory.scores, rows * KEYS);
        scratch(memory.transposed, padded * KEYS);
        scratch(memory.paired, padded * KEYS / 2);
    }

    // The i-th of the unit's heads.
    Head head_of(const Unit& unit, int64_t i, Memory& memory) const {
        const int64_t row = i * rows_of(unit);
        return {unit.head + i,
                {memory.top.data() + row, memory.total.data() + row, memory.sums.data() + row * padded},
                memory.query.data() + row * padded,
                memory.merged.data() + row * wide,
                memory.pairs.data() + row * padded / 2};
    }

    void begin(const Unit& unit, const Head& head) const {
        for (int64_t r = 0; r < rows_of(unit); r++) {
            const T* query = query_of(unit, head.number, r);
            PAIRS ? pad(query, head.pairs + r * padded / 2) : widen(query, head.query + r * padded);
            clear_span(head.merged + r * wide, padded);
        }
    }

    void list_ahead(const Unit& unit, int64_t first, Ahead& ahead) const {
        ahead.clear(unit.heads * dim * sizeof(T), a.kv_heads * dim * sizeof(T));
        const int64_t keys = std::min<int64_t>(KEYS, unit.end_key - first);
        for (int64_t pages : {a.key_pages, a.value_pages})
            each_run(unit, unit.head, first, keys, [&](int64_t, int64_t count, int64_t entry) {
                ahead.add((const char*)((const T*)pages + entry), count);
            });
    }

    // memory.scores [rows, KEYS], unscaled; what lies beyond `keys` is never used. Keys are transposed, which makes of
    // the scores a product like any other.
    void score(const Unit& unit, const Head& head, int64_t first, int64_t keys, Memory& memory) const {
        const int64_t rows = rows_of(unit), width = PAIRS ? padded / 2 : padded;
        uint32_t* transposed = memory.transposed.data();
        WORDS && dim == padded && a.block_size % 16 == 0 ? transpose_pages(unit, head, first, keys, memory)
                                                         : transpose_copies(unit, head, first, keys, memory);
        const int64_t columns = (keys + COLUMNS - 1) / COLUMNS * COLUMNS;
        float* scores = memory.scores.data();
        if constexpr (PAIRS) {
            const Asking<uint32_t, Ahead> right{transposed, &memory.ahead};
            wide_product(head.pairs, width, right, KEYS, width, scores, KEYS, false, rows, columns);
        } else {
            const Asking<float, Ahead> right{(float*)transposed, &memory.ahead};
            wide_product(head.query, width, right, KEYS, width, scores, KEYS, false, rows, columns);
        }
    }

    void transpose_pages(const Unit& unit, const Head& head, int64_t first, int64_t keys, Memory& memory) const {
#if defined(WIDE)
        const int64_t words = dim * sizeof(T) / 4, stride = a.kv_heads * words;
        each_run(unit, head.number, first, keys, [&](int64_t i, int64_t count, int64_t entry) {
            const uint32_t* key = (const uint32_t*)((const T*)a.key_pages + entry);
            for (int64_t j = 0; j < count; j += 16)
                for (int64_t column = 0; column < words; column += 16) {
                    memory.ahead.ask<8>();
                    transpose_square(key + j * stride + column, stride, memory.transposed.data() + column * KEYS + i + j, KEYS);
                }
        });
#endif
    }

    void transpose_copies(const Unit& unit, const Head& head, int64_t first, int64_t keys, Memory& memory) const {
        const int64_t width = PAIRS ? padded / 2 : padded;
        each_run(unit, head.number, first, keys, [&](int64_t i, int64_t count, int64_t entry) {
            const T* key = (const T*)a.key_pages + entry;
            for (int64_t j = i; j < i + count; j++, key += a.kv_heads * dim) {
                float* row = memory.keys.data() + j * width;
                PAIRS ? pad(key, row) : widen(key, row);
            }
        });
        transpose((const uint32_t*)memory.keys.data(), width, memory.transposed.data());
    }

    void sum_pairs(const Unit& unit, const Head& head, int64_t first, int64_t keys, Memory& memory) const {
#if defined(BF16_PAIRS)
        const T* values[KEYS];
        each_run(unit, head.number, first, keys, [&](int64_t i, int64_t count, int64_t entry) {
            for (int64_t j = i; j < i + count; j++, entry += a.kv_heads * dim) values[j] = (const T*)a.value_pages + entry;
        });
        for (int64_t j = 0; j < keys; j += 2)
            for (int64_t d = 0; d < dim; d += 32) {
                memory.ahead.ask<1>();
                const __mmask32 there = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
                const __m512i even = _mm512_maskz_loadu_epi16(there, values[j] + d);
                const __m512i odd = j + 1 < keys ? _mm512_maskz_loadu_epi16(there, values[j + 1] + d) : __m512i{};
                pair_up(even, odd, memory.paired.data() + j / 2 * padded + d);
            }
        const Asking<uint32_t, Ahead> right{memory.paired.data(), &memory.ahead};
        wide_product((const uint32_t*)memory.scores.data(), KEYS, right, padded, (keys + 1) / 2, head.now.sums, padded,
                     true, rows_of(unit), padded);
#endif
    }

    void sum_few(const Unit& unit, const Head& head, int64_t first, int64_t keys, Memory& memory) const {
        const int64_t rows = rows_of(unit), stride = a.kv_heads * dim;
        each_run(unit, head.number, first, keys, [&](int64_t i, int64_t count, int64_t entry) {
            for (int64_t d = 0; d < dim; d += COLUMNS)
                product(memory.scores.data() + i, KEYS, (const T*)a.value_pages + entry + d, stride, count,
                        head.now.sums + d, padded, true, rows);
        });
    }

    void sum_many(const Unit& unit, const Head& head, int64_t first, int64_t keys, Memory& memory) const {
        float* values = memory.values.data();
        each_run(unit, head.number, first, keys, [&](int64_t i, int64_t count, int64_t entry) {
            const T* value = (const T*)a.value_pages + entry;
            for (int64_t j = i; j < i + count; j++, value += a.kv_heads * dim) widen(value, values + j * padded);
        });
        for (int64_t d = 0; d < padded; d += COLUMNS)
            product(memory.scores.data(), KEYS, values + d, padded, keys, head.now.sums + d, padded, true,
                    rows_of(unit));
    }

    void finish(const Unit& unit, Memory& memory) {
        for (int64_t i = 0; i < unit.heads; i++) {
            const Head head = head_of(unit, i, memory);
            if (unit.spans > 1) {
                memcpy(partial(unit, i, unit.span), head.merged, a.group * wide * sizeof(float));
                continue;
            }
            for (int64_t r = 0; r < rows_of(unit); r++) write_out(unit, head.number, r, head.merged + r * wide);
        }
        if (unit.spans > 1 && waiting[unit.partial].fetch_sub(1) == 1)
            for (int64_t i = 0; i < unit.heads; i++) merge(unit, i, memory.merged.data());
    }

    float* partial(const Unit& unit, int64_t head, int64_t span) const {
        return partials + (unit.partial + head * unit.spans + span) * a.group * wide;
    }

    void merge(const Unit& unit, int64_t head, float* merged) {
        for (int64_t r = 0; r < a.group; r++) {
            clear_span(merged, padded);
            for (int64_t i = 0; i < unit.spans; i++) {
                const float* part = partial(unit, head, i) + r * wide;
                merge_span(merged, part[0], part[1], part + 2, padded);
            }
            write_out(unit, unit.head + head, r, merged);
        }
    }

    void write_out(const Unit& unit, int64_t head, int64_t row, const float* merged) const {
        T* out = out_of(unit, head, row);
        const float share = 1.f / merged[1];
        for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(merged + 2 + d) * share, dim - d);
    }
};

// Copies each token's keys and values [tokens, kv_heads, head_dim] to its slot of the pages.
struct Write {
    int64_t tokens, slots, row_bytes, key, key_stride_bytes, value, value_stride_bytes, key_pages, value_pages;
};

EXPORT int64_t quadriga_write(const int64_t* arguments, Member* member) {
    const Write& w = *(const Write*)arguments;
    parallel_each(member, 1, 1, [&](int64_t) {
        for (int64_t i = 0; i < w.tokens; i++) {
            const int64_t place = ((const int64_t*)w.slots)[i] * w.row_bytes;
            memcpy((char*)w.key_pages + place, (const char*)w.key + i * w.key_stride_bytes, w.row_bytes);
            memcpy((char*)w.value_pages + place, (const char*)w.value + i * w.value_stride_bytes, w.row_bytes);
        }
    });
    return 0;
}

EXPORT int64_t quadriga_attend(const int64_t* arguments, Member* member) {
    const Arguments& a = *(const Arguments*)arguments;
    with_format(a.format, [&](auto number) { Attention<decltype(number)>(a, member).run(); });
    return 0;
}

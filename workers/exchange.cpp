// The all-reduce of parallel/shared_memory.py, on the same segment and by the same protocol, without Python in between.
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <time.h>

#include "../attention/vector.h"

constexpr int64_t NAP_NS = 1000000;  // a rank that uses Python's half of the protocol wakes nobody

struct AllReduce {
    int64_t format, arrivals, counter_bytes, slots, slot_bytes, rank, size, spins, timeout_ns, tensor, count;
};

static int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

// Sleeps until `arrival`, which was `seen`, changes. A sleeper is let in at once when it is woken, even on a busy core,
// where one that polls and yields would wait for the turns of all others.
static void nap(const int64_t* arrival, int64_t seen) {
#if defined(__linux__)
    const timespec longest{0, NAP_NS};
    syscall(SYS_futex, (const uint32_t*)arrival, FUTEX_WAIT, (uint32_t)seen, &longest, nullptr, 0);
#else
    sched_yield();
#endif
}

static void arrive(int64_t* arrival, int64_t count) {
    __atomic_store_n(arrival, count, __ATOMIC_RELEASE);
#if defined(__linux__)
    syscall(SYS_futex, (const uint32_t*)arrival, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// False when the other did not come in time, or when this rank was told by `left` not to wait any longer.
static bool wait_for(const AllReduce& a, const int64_t* arrival, int64_t count, const int64_t* left) {
    for (int64_t spin = 0; spin < a.spins; spin++) {
        if (__atomic_load_n(arrival, __ATOMIC_ACQUIRE) >= count) return true;
        pause_briefly();
    }
    for (const int64_t deadline = now_ns() + a.timeout_ns;;) {
        const int64_t seen = __atomic_load_n(arrival, __ATOMIC_ACQUIRE);
        if (seen >= count) return true;
        if (now_ns() > deadline || __atomic_load_n(left, __ATOMIC_RELAXED)) return false;
        nap(arrival, seen);
    }
}

// Sums one slot's worth over the ranks. Returns 0, or 1 + the rank that is missing.
template <class T>
static int64_t reduce_piece(const AllReduce& a, T* piece, int64_t count) {
    auto arrival = [&](int64_t rank) { return (int64_t*)(a.arrivals + rank * a.counter_bytes); };
    const int64_t exchange = *arrival(a.rank);
    auto slot = [&](int64_t rank) { return (T*)(a.slots + (exchange % 2 * a.size + rank) * a.slot_bytes); };
    memcpy(slot(a.rank), piece, count * sizeof(T));
    arrive(arrival(a.rank), exchange + 1);
    for (int64_t rank = 0; rank < a.size; rank++)
        if (!wait_for(a, arrival(rank), exchange + 1, arrival(a.rank) + 1)) return rank + 1;
    for (int64_t i = 0; i < count; i += LANES) {
        floats total = {};
        for (int64_t rank = 0; rank < a.size; rank++) total += load(slot(rank) + i, count - i);
        store(piece + i, total, count - i);
    }
    return 0;
}

EXPORT int64_t quadriga_all_reduce(const int64_t* arguments, Member* member) {
    const AllReduce& a = *(const AllReduce*)arguments;
    int64_t missing = 0;
    parallel_each(member, 1, 1, [&](int64_t) {
        with_format(a.format, [&](auto number) {
            using T = decltype(number);
            const int64_t most = a.slot_bytes / (int64_t)sizeof(T);
            for (int64_t first = 0; first < a.count && !missing; first += most)
                missing = reduce_piece(a, (T*)a.tensor + first, std::min(most, a.count - first));
        });
        if (missing && member) member->team->status = missing;
    });
    return missing;
}

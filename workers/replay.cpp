// Recorded kernel calls, carried out by a team of threads in one parallel region.
#include <memory>

#include "../attention/vector.h"

struct Replay {
    int64_t threads, count, kernels, arguments;
};

// Returns 0, or the status of the first kernel that failed.
EXPORT int64_t quadriga_replay(const int64_t* arguments, Member*) {
    static thread_local std::unique_ptr<Task[]> tasks;
    static thread_local int64_t room = 0;
    static thread_local std::vector<char> memory;
    const Replay& r = *(const Replay*)arguments;
    if (room < r.count) tasks = std::make_unique<Task[]>(room = r.count);
    for (int64_t i = 0; i < r.count; i++) tasks[i].next = tasks[i].done = 0;
    Team team{tasks.get(), {0}, {}, -1, &memory};
    in_threads(r.threads, [&] {
        using Kernel = int64_t (*)(const int64_t*, Member*);
        Member member{&team, 0};
        for (int64_t i = 0; i < r.count && !team.status; i++)
            ((const Kernel*)r.kernels)[i](((const int64_t* const*)r.arguments)[i], &member);
    });
    return team.status;
}

// A server's threads. Each thread replaces random blocks of its set, then hands the set to a new
// thread and ends, so threads free blocks that other threads got. With SIZED, operator delete is
// told the size.
#include "load.h"
#include <new>

enum { SLOTS = SCALED(1000, 200), GENERATIONS = SCALED(80, 2), REPLACED = SCALED(250000, 500), LEAST = 8, MOST = 1000 };

struct Set {
    uint64_t random;
    uint64_t result;
    unsigned char *blocks[SLOTS];
    size_t sizes[SLOTS];
};

static void give_back(Set *set, size_t slot) {
    set->result += set->blocks[slot][0];
#ifdef SIZED
    ::operator delete(set->blocks[slot], set->sizes[slot]);
#else
    ::operator delete(set->blocks[slot]);
#endif
}

static void fill(Set *set, size_t slot) {
    size_t size = LEAST + below(&set->random, MOST - LEAST + 1);
    set->blocks[slot] = static_cast<unsigned char *>(::operator new(size));
    set->blocks[slot][0] = static_cast<unsigned char>(size);
    set->blocks[slot][size - 1] = 1;
    set->sizes[slot] = size;
}

static void *generation(void *argument) {
    Set *set = static_cast<Set *>(argument);
    for (int i = 0; i < REPLACED; i++) {
        size_t slot = below(&set->random, SLOTS);
        give_back(set, slot);
        fill(set, slot);
    }
    return nullptr;
}

static uint64_t total;

static void *lineage(void *argument) {
    Set *set = new Set();
    set->random = seed(reinterpret_cast<uint64_t>(argument));
    for (size_t slot = 0; slot < SLOTS; slot++) fill(set, slot);
    for (int i = 0; i < GENERATIONS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, generation, set)) die("no thread");
        pthread_join(thread, nullptr);
    }
    for (size_t slot = 0; slot < SLOTS; slot++) give_back(set, slot);
    __atomic_fetch_add(&total, set->result, __ATOMIC_RELAXED);
    delete set;
    return nullptr;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    run_threads(load_threads, lineage);
    finish(total);
}

// slab_test's six scenarios (bench/README.md, "What `slab` measures"), for `cargo xtask many`.
// Called with: SCENARIO SIZE OBJECTS THREADS NUMBER, and `cache` for a cache of Pinfold's.
//
// A thread on each CPU makes some passes that do not count, and then some that count. Prints the
// cycles of an allocation and of a free.
#include "load.h"
#include <x86intrin.h>

enum { UNCOUNTED = 2, COUNTED = 2, HANDED = 100 };
enum scenario { SINGLE, PAIR, CONCURRENT, CONCURRENT_PAIR, REMOTE, ONE_TO_N, SCENARIOS };
static const char *const NAMES[SCENARIOS] = {"single",          "pair",   "concurrent",
                                             "concurrent_pair", "remote", "one_to_n"};

// A thread's objects, and how many of them the first thread has handed over.
struct desk {
    void **slots;
    size_t handed;
    uint64_t cycles[2], operations[2];
} __attribute__((aligned(128)));

static enum scenario scenario;
static size_t size, objects;
static struct desk *desks;
static void *cache;
static void *(*cache_alloc)(void *);
static void (*cache_free)(void *, void *);

static inline void *allocate(void) {
    void *object = cache ? cache_alloc(cache) : malloc(size);
    if (!object) die("no memory");
    return object;
}

static inline void release(void *object) {
    if (cache) cache_free(cache, object);
    else free(object);
}

static void fill(struct desk *own, struct desk *desk, size_t from, size_t to) {
    uint64_t start = __rdtsc();
    for (size_t i = from; i < to; i++) {
        void *object = allocate();
        many_touch(object);
        desk->slots[i] = object;
    }
    own->cycles[0] += __rdtsc() - start;
    own->operations[0] += to - from;
}

static void empty(struct desk *own, const struct desk *desk, size_t from, size_t to) {
    uint64_t start = __rdtsc();
    for (size_t i = from; i < to; i++) release(desk->slots[i]);
    own->cycles[1] += __rdtsc() - start;
    own->operations[1] += to - from;
}

static void make_pairs(struct desk *own) {
    uint64_t start = __rdtsc();
    for (size_t i = 0; i < objects; i++) release(allocate());
    own->cycles[0] += __rdtsc() - start;
    own->operations[0] += objects;
}

// Waits until all threads are here. Before work, no CPU works until all know that they can.
#define meet(mark)                                                                                 \
    do {                                                                                           \
        unsigned turn = __atomic_load_n(&turns, __ATOMIC_RELAXED);                                 \
        if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == threads) {                        \
            __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);                                       \
            __atomic_store_n(&turns, turn + 1, __ATOMIC_RELEASE);                                  \
        } else {                                                                                   \
            while (__atomic_load_n(&turns, __ATOMIC_ACQUIRE) == turn) many_mark(mark);             \
        }                                                                                          \
    } while (0)

static unsigned threads, arrived __attribute__((aligned(128))), turns __attribute__((aligned(128)));

static void hand_over(void) {
    for (size_t from = 0; from < objects; from += HANDED)
        for (unsigned to = 1; to < threads; to++) {
            fill(&desks[0], &desks[to], from, from + HANDED);
            __atomic_store_n(&desks[to].handed, from + HANDED, __ATOMIC_RELEASE);
        }
}

static void free_as_handed_over(struct desk *own) {
    for (size_t freed = 0; freed < objects; freed += HANDED) {
        while (__atomic_load_n(&own->handed, __ATOMIC_ACQUIRE) <= freed) many_mark(MANY_WAIT);
        empty(own, own, freed, freed + HANDED);
    }
}

// The half of a pass before the second meeting, and the half after it.
static void first_half(unsigned thread) {
    struct desk *own = &desks[thread];
    switch (scenario) {
    case SINGLE:
    case CONCURRENT:
        fill(own, own, 0, objects);
        break;
    case PAIR:
    case CONCURRENT_PAIR:
        make_pairs(own);
        break;
    case REMOTE:
        if (thread) fill(own, own, 0, objects);
        break;
    default:
        if (thread) free_as_handed_over(own);
        else hand_over();
    }
}

static void second_half(unsigned thread) {
    struct desk *own = &desks[thread];
    if (scenario == SINGLE || scenario == CONCURRENT) empty(own, own, 0, objects);
    if (scenario == REMOTE && !thread)
        for (unsigned of = 1; of < threads; of++) empty(own, &desks[of], 0, objects);
}

static void *work(void *number) {
    unsigned thread = (unsigned)(uintptr_t)number;
    struct desk *own = &desks[thread];
    for (int pass = 0; pass < UNCOUNTED + COUNTED; pass++) {
        own->handed = 0;
        if (pass == UNCOUNTED) {
            memset(own->cycles, 0, sizeof own->cycles);
            memset(own->operations, 0, sizeof own->operations);
        }
        meet(MANY_WAIT);
        if (pass >= UNCOUNTED && !thread) many_mark(MANY_COUNT);
        meet(MANY_WAIT_TO_WORK);
        first_half(thread);
        meet(MANY_WAIT);
        meet(MANY_WAIT_TO_WORK);
        second_half(thread);
        meet(MANY_WAIT);
        if (!thread) many_mark(MANY_STOP);
    }
    return NULL;
}

static void *function(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found) die("the allocator has no caches");
    return found;
}

static void make_cache(void) {
    void *(*create)(const char *, size_t, size_t, unsigned, void (*)(void *)) =
        (void *(*)(const char *, size_t, size_t, unsigned, void (*)(void *)))function(
            "pinfold_cache_create");
    cache_alloc = (void *(*)(void *))function("pinfold_cache_alloc");
    cache_free = (void (*)(void *, void *))function("pinfold_cache_free");
    many_value(MANY_ALLOC, cache_alloc);
    many_value(MANY_FREE, cache_free);
    cache = create("many", size, 0, 0, NULL);
    if (!cache) die("no cache");
}

int main(int argc, char **argv) {
    if (argc < 6) die("usage: many SCENARIO SIZE OBJECTS THREADS NUMBER [cache]");
    while (scenario < SCENARIOS && strcmp(NAMES[scenario], argv[1])) scenario++;
    size = strtoul(argv[2], NULL, 10);
    objects = strtoul(argv[3], NULL, 10);
    threads = (unsigned)atoi(argv[4]);
    if (scenario == SCENARIOS || !size || !objects || objects % HANDED || threads < 1)
        die("usage: a known scenario, a size, a multiple of 100 objects, threads");
    if (scenario <= PAIR) threads = 1;
    desks = (struct desk *)aligned_alloc(128, threads * sizeof *desks);
    if (!desks) die("no memory");
    memset(desks, 0, threads * sizeof *desks);
    for (unsigned i = 0; i < threads; i++) {
        desks[i].slots = (void **)aligned_alloc(128, (objects * sizeof(void *) + 127) / 128 * 128);
        if (!desks[i].slots) die("no memory");
        memset(desks[i].slots, 0, objects * sizeof(void *));
    }
    many_begin(argv[5]);
    if (argc > 6) make_cache();
    run_threads((int)threads, work);
    many_mark(MANY_REPORT);
    uint64_t cycles[2] = {0}, operations[2] = {0};
    for (unsigned i = 0; i < threads; i++)
        for (int op = 0; op < 2; op++) {
            cycles[op] += desks[i].cycles[op];
            operations[op] += desks[i].operations[op];
        }
    printf("cycles");
    for (int op = 0; op < 2; op++)
        printf(" %.2f", operations[op] ? (double)cycles[op] / (double)operations[op] : 0.0);
    printf("\n");
    fflush(stdout);
    _exit(0);
}

// Threads that get blocks of all sizes, keep some, free some, and exchange some through a table
// that all threads share. All threads end and new threads start several times, so blocks outlive
// the threads that got them.
#include "load.h"

enum { TRANSFER = 1000, GENERATIONS = SCALED(30, 2), STEPS = SCALED(60000, 500), KEPT = SCALED(2000, 100) };

// A block's first word is its size in words. `drop` checks the other words.
static uint64_t *shared[TRANSFER];
static uint64_t generation, got, freed;

static uint64_t *make(uint64_t *random) {
    size_t words = below(random, 1000) == 0 ? 5000 + below(random, 60000)
                   : below(random, 20) == 0 ? 100 + below(random, 1000)
                                            : 2 + below(random, 30);
    uint64_t *block = (uint64_t *)get(words * sizeof *block);
    for (size_t i = 0; i < words; i++) block[i] = words ^ i;
    return block;
}

static uint64_t drop(uint64_t *block) {
    if (!block) return 0;
    size_t words = block[0];
    for (size_t i = 1; i < words; i++)
        if (block[i] != (words ^ i)) die("a block was overwritten");
    free(block);
    return 1;
}

static void *work(void *number) {
    uint64_t random = seed(generation * 1000 + (uint64_t)number), made = 0, dropped = 0;
    uint64_t **kept = (uint64_t **)calloc(KEPT, sizeof *kept);
    if (!kept) die("no memory");
    for (int i = 0; i < STEPS; i++) {
        size_t slot = below(&random, KEPT);
        uint64_t *block = make(&random);
        made++;
        if (below(&random, 4) == 0)
            block = __atomic_exchange_n(&shared[below(&random, TRANSFER)], block,
                                        __ATOMIC_ACQ_REL);
        dropped += drop(kept[slot]);
        kept[slot] = block;
    }
    for (int i = 0; i < KEPT; i++) dropped += drop(kept[i]);
    free(kept);
    __atomic_fetch_add(&got, made, __ATOMIC_RELAXED);
    __atomic_fetch_add(&freed, dropped, __ATOMIC_RELAXED);
    return NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    for (generation = 0; generation < GENERATIONS; generation++) run_threads(load_threads, work);
    for (int i = 0; i < TRANSFER; i++) freed += drop(shared[i]);
    if (got != freed) die("not every block came back");
    finish(got);
}

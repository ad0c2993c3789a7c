// Threads with a large table each. Each thread fills empty places and empties full places, at
// random. Most blocks are small.
#include "load.h"

enum { SLOTS = 65536, STEPS = 8000000 };
static uint64_t total;

static void *work(void *number) {
    uint64_t random = seed((uint64_t)number + 100), result = 0;
    unsigned char **blocks = (unsigned char **)calloc(SLOTS, sizeof *blocks);
    if (!blocks) die("no memory");
    for (int i = 0; i < STEPS; i++) {
        size_t slot = below(&random, SLOTS);
        if (blocks[slot]) {
            result += blocks[slot][0];
            free(blocks[slot]);
            blocks[slot] = NULL;
        } else {
            blocks[slot] = (unsigned char *)get(log_size(&random, 8, 1024));
            blocks[slot][0] = (unsigned char)i;
        }
    }
    for (int i = 0; i < SLOTS; i++) free(blocks[i]);
    free(blocks);
    __atomic_fetch_add(&total, result, __ATOMIC_RELAXED);
    return NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    run_threads(load_threads, work);
    finish(total);
}

// Threads with a working set each. Each thread replaces random blocks of 4 bytes to 32 KiB; small
// blocks are more frequent.
#include "load.h"

enum { SLOTS = 1024, REPLACED = 10000000 };
static uint64_t total;

static void *work(void *number) {
    uint64_t random = seed((uint64_t)number), result = 0;
    unsigned char **blocks = (unsigned char **)calloc(SLOTS, sizeof *blocks);
    if (!blocks) die("no memory");
    for (int i = 0; i < REPLACED; i++) {
        size_t slot = below(&random, SLOTS);
        if (blocks[slot]) result += blocks[slot][0];
        free(blocks[slot]);
        // The square of the logarithm's share makes large blocks rare.
        size_t share = below(&random, 1000) * below(&random, 1000) / 1000;
        size_t size = ((size_t)4 << (share * 13 / 1000)) + below(&random, 4);
        blocks[slot] = (unsigned char *)get(size);
        blocks[slot][0] = (unsigned char)i;
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

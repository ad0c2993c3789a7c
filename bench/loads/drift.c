// A steady 57 MiB whose block sizes grow from 1 to 32 bytes up to 1 to 2400 bytes, as the contents
// of a cache change. Memory that small blocks used must serve larger blocks.
#include "load.h"

enum { SLOTS = 200000, ROUNDS = 600, STEPS = 20000, MOST = 60000000 };

int main(int argc, char **argv) {
    begin(argc, argv);
    uint64_t random = seed(99), result = 0;
    unsigned char **blocks = (unsigned char **)calloc(SLOTS, sizeof *blocks);
    unsigned *sizes = (unsigned *)calloc(SLOTS, sizeof *sizes);
    if (!blocks || !sizes) die("no memory");
    size_t live = 0;
    for (int round = 0; round < ROUNDS; round++) {
        size_t widest = 16 + (size_t)(round < ROUNDS / 2 ? round : ROUNDS / 2) * 1200 / (ROUNDS / 2);
        for (int i = 0; i < STEPS; i++) {
            size_t slot = below(&random, SLOTS), size = 1 + below(&random, widest) * 2;
            if (blocks[slot]) result += blocks[slot][0];
            live -= sizes[slot];
            free(blocks[slot]);
            blocks[slot] = NULL;
            sizes[slot] = 0;
            if (live > MOST) continue;
            blocks[slot] = (unsigned char *)get(size);
            memset(blocks[slot], i, size);
            sizes[slot] = (unsigned)size;
            live += size;
        }
    }
    // The blocks stay, so that the settled memory shows what an allocator needs around them.
    finish(result + live);
}

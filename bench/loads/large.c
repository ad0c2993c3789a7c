// One thread replaces random blocks of a small set and writes a byte of each page of every new
// block.
//
// malloc-large: twenty blocks of 5 to 25 MiB. With SIZES_2_64, large: six blocks of 2 to 64 MiB,
// spread over the logarithm.
#include "load.h"

#ifdef SIZES_2_64
enum { SLOTS = 6, STEPS = 250 };
static size_t next_size(uint64_t *random) { return log_size(random, 2 * MIB, 64 * MIB - 1); }
#else
enum { SLOTS = 20, STEPS = 500 };
static size_t next_size(uint64_t *random) { return 5 * MIB + below(random, 20 * MIB); }
#endif

int main(int argc, char **argv) {
    begin(argc, argv);
    uint64_t random = seed(3), result = 0;
    char *blocks[SLOTS] = {0};
    for (int i = 0; i < STEPS; i++) {
        size_t slot = below(&random, SLOTS), size = next_size(&random);
        free(blocks[slot]);
        blocks[slot] = (char *)get_touched(size);
        result += size;
    }
    for (int i = 0; i < SLOTS; i++) free(blocks[i]);
    finish(result);
}

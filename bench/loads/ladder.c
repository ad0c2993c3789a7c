// Sizes climb from 16 to 2048 bytes in steps of 16. Each step allocates 8 MiB, and then frees the
// step before, except every 64th object. The objects that stay hold the memory of the small sizes,
// unless it can serve larger sizes.
#include "load.h"

enum { STEPS = 128, KEPT = 64 };
static const size_t BYTES = 8 * MIB;
static unsigned char *steps[2][8 * 1024 * 1024 / 16];

int main(int argc, char **argv) {
    begin(argc, argv);
    uint64_t result = 0;
    size_t before = 0;
    for (size_t step = 1; step <= STEPS; step++) {
        size_t size = 16 * step, count = BYTES / size;
        unsigned char **blocks = steps[step % 2], **old = steps[(step + 1) % 2];
        for (size_t i = 0; i < count; i++) {
            blocks[i] = (unsigned char *)get(size);
            memset(blocks[i], (int)step, size);
        }
        for (size_t i = 0; i < before; i++) {
            if (i % KEPT == 0) continue;
            result += old[i][0];
            free(old[i]);
        }
        before = count;
    }
    finish(result);
}

// Holds 100 MiB in blocks of one size, frees all of them, and goes on with the next size. Memory
// that one size used must serve other sizes.
#include "load.h"

int main(int argc, char **argv) {
    begin(argc, argv);
    static const size_t sizes[] = {64, 96, 128, 192, 256, 320};
    const size_t live = 100 * MIB;
    unsigned char **blocks = (unsigned char **)get(live / 64 * sizeof *blocks);
    uint64_t result = 0;
    for (size_t phase = 0; phase < 12; phase++) {
        size_t size = sizes[phase % 6], count = live / size;
        for (size_t i = 0; i < count; i++) {
            blocks[i] = (unsigned char *)get(size);
            memset(blocks[i], (int)phase, size);
        }
        for (size_t i = 0; i < count; i++) {
            result += blocks[i][0];
            free(blocks[i]);
        }
    }
    free(blocks);
    finish(result);
}

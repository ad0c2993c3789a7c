// One thread gets a batch of blocks of one size and frees it: in the order in which it got the
// blocks, in the opposite order, or mixed. A batch has at most 48 KiB.
#include "load.h"

enum { MOST = 400 };
static void *blocks[MOST];

int main(int argc, char **argv) {
    begin(argc, argv);
    static const size_t sizes[] = {16, 32, 64, 128, 256, 512, 1024, 2048};
    uint64_t result = 0;
    for (int round = 0; round < 30000; round++)
        for (size_t kind = 0; kind < sizeof sizes / sizeof *sizes; kind++) {
            int count = 25 << (round % 5), most = (int)(48 * KIB / sizes[kind]);
            if (count > most) count = most;
            for (int i = 0; i < count; i++) blocks[i] = get(sizes[kind]);
            for (int i = 0; i < count; i++) {
                // Seven and the counts have no common divisor, so the mixed order visits every
                // block once.
                int mixed = (i * 7 + 3) % count;
                free(blocks[round % 3 == 0 ? i : round % 3 == 1 ? count - 1 - i : mixed]);
            }
            result += (uint64_t)count * sizes[kind];
        }
    finish(result);
}

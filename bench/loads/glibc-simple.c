// One thread gets a batch of blocks of one size and frees it: in the order it got them, in the opposite order, or mixed.
#include "load.h"

enum { MOST = 400 };
static void *blocks[MOST];

int main(int argc, char **argv) {
    begin(argc, argv);
    static const size_t sizes[] = {16, 32, 64, 128, 256, 512, 1024, 2048};
    uint64_t result = 0;
    void *last = get(5000);
    for (int round = 0; round < 12000; round++)
        for (size_t kind = 0; kind < sizeof sizes / sizeof *sizes; kind++) {
            int count = 25 << (round % 5);
            for (int i = 0; i < count; i++) blocks[i] = get(sizes[kind]);
            // One block stays until the next batch is there, so that the heap's end is not given back each time.
            void *pin = get(5000);
            free(last);
            last = pin;
            for (int i = 0; i < count; i++) {
                // Seven and the counts have no common divisor, so the mixed order meets every block once.
                int at = round % 3 == 0 ? i : round % 3 == 1 ? count - 1 - i : (i * 7 + 3) % count;
                free(blocks[at]);
            }
            result += (uint64_t)count * sizes[kind];
        }
    free(last);
    finish(result);
}

// Threads that each write a small block of their own again and again. This is slow if the blocks of
// two threads share a cache line.
//
// cache-thrash: every thread gets its blocks itself. With SCRATCH, cache-scratch: the main thread
// gets the first blocks one after the other and gives one to each thread, which frees it. Threads
// then share cache lines if the allocator hands parts of one line to several threads.
#include "load.h"

enum { ROUNDS = 12000, WRITES = 100000, SIZE = 8 };
static unsigned char **given;
static uint64_t total;

static void *work(void *number) {
    uint64_t result = 0;
#ifdef SCRATCH
    free(given[(long)number]);
#else
    (void)number;
#endif
    for (int i = 0; i < ROUNDS; i++) {
        volatile unsigned char *block = (volatile unsigned char *)get(SIZE);
        for (int at = 0; at < SIZE; at++) block[at] = (unsigned char)at;
        for (int j = 0; j < WRITES / SIZE; j++)
            for (int at = 0; at < SIZE; at++) block[at]++;
        result += block[SIZE - 1];
        free((void *)block);
    }
    __atomic_fetch_add(&total, result, __ATOMIC_RELAXED);
    return NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
#ifdef SCRATCH
    given = (unsigned char **)get(sizeof *given * (size_t)load_threads);
    for (int i = 0; i < load_threads; i++) given[i] = (unsigned char *)get(SIZE);
#endif
    run_threads(load_threads, work);
    free(given);
    finish(total);
}

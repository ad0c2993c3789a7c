// Thousands of short threads. Each gets and frees a few blocks, and every tenth leaves one block to
// the main thread. Memory that an allocator keeps for ended threads adds up here.
#include "load.h"

enum { THREADS = 12000, BLOCKS = 100, LEFT = 10 };
static uint64_t total;

static void *work(void *number) {
    uint64_t random = seed((uint64_t)number), result = 0;
    unsigned char *blocks[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = (unsigned char *)get(log_size(&random, 16, 4095));
        blocks[i][0] = (unsigned char)i;
    }
    int left = (long)number % LEFT == 0;
    for (int i = left; i < BLOCKS; i++) {
        result += blocks[i][0];
        free(blocks[i]);
    }
    __atomic_fetch_add(&total, result, __ATOMIC_RELAXED);
    return left ? blocks[0] : NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    pthread_t *threads = (pthread_t *)get(sizeof *threads * (size_t)load_threads);
    for (long first = 0; first < THREADS; first += load_threads) {
        for (int i = 0; i < load_threads; i++)
            if (pthread_create(&threads[i], NULL, work, (void *)(first + i))) die("no thread");
        for (int i = 0; i < load_threads; i++) {
            void *left;
            pthread_join(threads[i], &left);
            free(left);
        }
    }
    free(threads);
    finish(total);
}

// 1,000 threads that sleep. One after the other, each gets and frees 1 MiB in blocks and then
// sleeps, until all have done so. Memory that an allocator keeps for threads adds up here.
#include "load.h"
#include <semaphore.h>

enum { THREADS = 1000, BYTES = 1 << 20, MOST = 4095 };
static sem_t done, over;
static uint64_t total;

static void *work(void *number) {
    uint64_t random = seed((uint64_t)number), result = 0;
    static unsigned char *blocks[BYTES / 16];
    size_t count = 0;
    for (size_t bytes = 0; bytes < BYTES; count++) {
        size_t size = log_size(&random, 16, MOST);
        blocks[count] = (unsigned char *)get(size);
        memset(blocks[count], (int)count | 1, size);
        bytes += size;
    }
    for (size_t i = 0; i < count; i++) {
        result += blocks[i][0];
        free(blocks[i]);
    }
    total += result;
    sem_post(&done);
    while (sem_wait(&over)) continue;
    return NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    static pthread_t threads[THREADS];
    if (sem_init(&done, 0, 0) || sem_init(&over, 0, 0)) die("no semaphore");
    for (long i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, work, (void *)i)) die("no thread");
        while (sem_wait(&done)) continue;
    }
    for (int i = 0; i < THREADS; i++) sem_post(&over);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    finish(total);
}

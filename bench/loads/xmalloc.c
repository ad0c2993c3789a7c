// Half of the threads get batches of blocks, the other half frees them. So each block is freed by
// another thread than the one that got it.
#include "load.h"

enum { BATCH = SCALED(500, 50), BATCHES = SCALED(12000, 20), WAITING = 40 };

struct batch {
    struct batch *next;
    unsigned char *blocks[BATCH];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct batch *waiting;
static int count, taken;
static uint64_t total;

static void *getter(void *number) {
    uint64_t random = seed((uint64_t)number);
    for (int i = 0; i < BATCHES; i++) {
        struct batch *batch = (struct batch *)get(sizeof *batch);
        for (int j = 0; j < BATCH; j++) {
            batch->blocks[j] = (unsigned char *)get(log_size(&random, 8, 512));
            batch->blocks[j][0] = (unsigned char)j;
        }
        pthread_mutex_lock(&lock);
        while (count >= WAITING) pthread_cond_wait(&changed, &lock);
        batch->next = waiting;
        waiting = batch;
        count++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void *freer(void *number) {
    (void)number;
    uint64_t result = 0;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!waiting && taken < BATCHES * load_threads)
            pthread_cond_wait(&changed, &lock);
        struct batch *batch = waiting;
        if (batch) {
            waiting = batch->next;
            count--;
            taken++;
            pthread_cond_broadcast(&changed);
        }
        pthread_mutex_unlock(&lock);
        if (!batch) break;
        for (int j = 0; j < BATCH; j++) {
            result += batch->blocks[j][0];
            free(batch->blocks[j]);
        }
        free(batch);
    }
    __atomic_fetch_add(&total, result, __ATOMIC_RELAXED);
    return NULL;
}

static void *either(void *number) {
    long which = (long)number;
    return which < load_threads ? getter(number) : freer(number);
}

int main(int argc, char **argv) {
    begin(argc, argv);
    run_threads(2 * load_threads, either);
    finish(total);
}

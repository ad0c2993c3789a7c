// Threads that keep thousands of blocks of 16 bytes to 16 KiB and replace them in loops. Each
// thread also frees whole batches that its neighbour got.
#include "load.h"

enum { KEPT = SCALED(4000, 100), LOOPS = SCALED(500, 5), BATCH = SCALED(1000, 100) };

struct batch {
    struct batch *next;
    unsigned char *blocks[BATCH];
};

static struct batch **inbox;
static uint64_t total;

static void post(long to, struct batch *batch) {
    batch->next = __atomic_load_n(&inbox[to], __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&inbox[to], &batch->next, batch, 1, __ATOMIC_RELEASE,
                                        __ATOMIC_RELAXED)) {
    }
}

static uint64_t empty(long of) {
    uint64_t result = 0;
    struct batch *batch = __atomic_exchange_n(&inbox[of], NULL, __ATOMIC_ACQUIRE), *next;
    for (; batch; batch = next) {
        next = batch->next;
        for (int i = 0; i < BATCH; i++) {
            result += batch->blocks[i][0];
            free(batch->blocks[i]);
        }
        free(batch);
    }
    return result;
}

static void *work(void *argument) {
    long number = (long)argument;
    uint64_t random = seed((uint64_t)number + 7), result = 0;
    unsigned char **kept = (unsigned char **)calloc(KEPT, sizeof *kept);
    if (!kept) die("no memory");
    for (int loop = 0; loop < LOOPS; loop++) {
        for (int i = 0; i < KEPT; i++) {
            size_t slot = below(&random, KEPT);
            if (kept[slot]) result += kept[slot][0];
            free(kept[slot]);
            kept[slot] = (unsigned char *)get(log_size(&random, 16, 16383));
            kept[slot][0] = (unsigned char)i;
        }
        struct batch *batch = (struct batch *)get(sizeof *batch);
        for (int i = 0; i < BATCH; i++) {
            batch->blocks[i] = (unsigned char *)get(log_size(&random, 16, 4095));
            batch->blocks[i][0] = (unsigned char)i;
        }
        post((number + 1) % load_threads, batch);
        result += empty(number);
    }
    for (int i = 0; i < KEPT; i++) {
        if (kept[i]) result += kept[i][0];
        free(kept[i]);
    }
    free(kept);
    __atomic_fetch_add(&total, result, __ATOMIC_RELAXED);
    return NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    inbox = (struct batch **)calloc((size_t)load_threads, sizeof *inbox);
    if (!inbox) die("no memory");
    run_threads(load_threads, work);
    for (long i = 0; i < load_threads; i++) total += empty(i);
    free(inbox);
    finish(total);
}

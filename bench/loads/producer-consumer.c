// Pairs of threads with a ring between them. One gets and writes messages of 16 bytes to 2 KiB, the
// other reads and frees them. Each thread sends to one neighbour and receives from the other.
#include "load.h"
#include <sched.h>

enum { RING = 1024, MESSAGES = 3000000 };

struct ring {
    _Alignas(128) unsigned char *messages[RING];
    _Alignas(128) unsigned written;
    _Alignas(128) unsigned read;
};

static struct ring *rings;
static uint64_t total;

static void *work(void *argument) {
    long number = (long)argument;
    struct ring *out = &rings[number], *in = &rings[(number + 1) % load_threads];
    uint64_t random = seed((uint64_t)number), result = 0;
    unsigned sent = 0, received = 0;
    while (sent < MESSAGES || received < MESSAGES) {
        int idle = 1;
        while (sent < MESSAGES && sent - __atomic_load_n(&out->read, __ATOMIC_ACQUIRE) < RING) {
            unsigned char *message = (unsigned char *)get(log_size(&random, 16, 2047));
            message[0] = (unsigned char)sent;
            out->messages[sent % RING] = message;
            __atomic_store_n(&out->written, ++sent, __ATOMIC_RELEASE);
            idle = 0;
        }
        while (received < MESSAGES && received != __atomic_load_n(&in->written, __ATOMIC_ACQUIRE)) {
            unsigned char *message = in->messages[received % RING];
            result += message[0];
            free(message);
            __atomic_store_n(&in->read, ++received, __ATOMIC_RELEASE);
            idle = 0;
        }
        if (idle) sched_yield();
    }
    __atomic_fetch_add(&total, result, __ATOMIC_RELAXED);
    return NULL;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    rings = (struct ring *)aligned_alloc(128, sizeof *rings * (size_t)load_threads);
    if (!rings) die("no memory");
    memset(rings, 0, sizeof *rings * (size_t)load_threads);
    run_threads(load_threads, work);
    free(rings);
    finish(total);
}

// Shared by all loads: deterministic random numbers, threads, and the lines that report the result.
//
// With MANY defined, a load tells the emulator's plugin when it works (many.h), does less, and pins
// its threads.
//
// A load is called with the number of threads and the seconds to settle. Its amount of work depends
// on the number of threads only. Its sizes and orders come from fixed seeds. It ends with `finish`.
#ifndef LOAD_H
#define LOAD_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#ifdef MANY
#include "many.h"
#include <dlfcn.h>
#include <sched.h>
#define SCALED(usual, emulated) (emulated)
#else
#define SCALED(usual, emulated) (usual)
#endif

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static int load_threads = 1;
static double load_settle = 0;

__attribute__((unused)) static void die(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(3);
}

#ifdef MANY
static char load_number[4096];

// Tells the plugin the allocator's functions and the number of this run.
static void many_begin(const char *number) {
    static const char *const ALLOC[] = {"malloc", "calloc", "realloc", "aligned_alloc",
                                        "posix_memalign", "_Znwm", "_Znam"};
    static const char *const FREE[] = {"free", "_ZdlPv", "_ZdaPv", "_ZdlPvm"};
    many_value(MANY_FORGET, load_number);
    for (size_t i = 0; i < sizeof ALLOC / sizeof *ALLOC; i++) {
        void *found = dlsym(RTLD_DEFAULT, ALLOC[i]);
        if (found) many_value(MANY_ALLOC, found);
    }
    for (size_t i = 0; i < sizeof FREE / sizeof *FREE; i++) {
        void *found = dlsym(RTLD_DEFAULT, FREE[i]);
        if (found) many_value(MANY_FREE, found);
    }
    Dl_info info;
    if (dladdr(dlsym(RTLD_DEFAULT, "malloc"), &info)) many_value(MANY_ALLOCATOR, info.dli_fbase);
    if (dladdr((void *)getppid, &info)) many_value(MANY_LIBC, info.dli_fbase);
    if (dladdr((void *)load_number, &info)) many_value(MANY_PROGRAM, info.dli_fbase);
    many_value(MANY_ZERO, load_number);
    many_value(MANY_NUMBER, load_number + (unsigned)atoi(number) % sizeof load_number);
    many_mark(MANY_CLEAR);
}

static void many_pin(long number) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)number % (size_t)sysconf(_SC_NPROCESSORS_ONLN), &set);
    if (sched_setaffinity(0, sizeof set, &set)) die("cannot pin a thread");
}

static void *(*many_body)(void *);

static void *many_run(void *number) {
    many_pin((long)number);
    return many_body(number);
}
#endif

__attribute__((unused)) static void begin(int argc, char **argv) {
#ifdef MANY
    if (argc != 4) die("usage: LOAD THREADS SETTLE NUMBER");
    many_begin(argv[3]);
    many_mark(MANY_COUNT);
#else
    if (argc != 3) die("usage: LOAD THREADS SETTLE");
#endif
    load_threads = atoi(argv[1]);
    load_settle = atof(argv[2]);
    if (load_threads < 1 || load_threads > 1024) die("THREADS must be from 1 to 1024");
}

// Returns a generator's initial state for stream `number`. It is never 0.
__attribute__((unused)) static uint64_t seed(uint64_t number) {
    return (number + 1) * 0x9e3779b97f4a7c15u | 1;
}

// Steps xorshift64* and returns the upper half of the product, which is the more random one.
__attribute__((unused)) static uint32_t draw(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return (uint32_t)(*state * 0x2545f4914f6cdd1du >> 32);
}

__attribute__((unused)) static size_t below(uint64_t *state, size_t most) {
    return (size_t)((uint64_t)draw(state) * most >> 32);
}

// Returns a size from `least` to `most`, spread evenly over its logarithm: sizes from 16 to 31 are
// as frequent as sizes from 2048 to 4095.
__attribute__((unused)) static size_t log_size(uint64_t *state, size_t least, size_t most) {
    unsigned doublings = 0;
    while ((least << (doublings + 1)) <= most) doublings++;
    size_t low = least << below(state, doublings + 1);
    size_t high = low * 2 - 1 < most ? low * 2 - 1 : most;
    return low + below(state, high - low + 1);
}

// Calls malloc and ends the program if there is no memory. Writes the block's first and last byte.
__attribute__((unused)) static void *get(size_t size) {
    char *block = (char *)malloc(size);
    if (!block) die("no memory");
    block[0] = (char)size;
    block[size - 1] = (char)(size >> 8);
    return block;
}

// Calls `get` and writes a byte of each page. No byte is 0, so that an allocator which reads the
// block sees that the pages were written.
__attribute__((unused)) static void *get_touched(size_t size) {
    char *block = (char *)get(size);
    for (size_t at = 0; at < size; at += 4096) block[at] = (char)(at >> 12 | 1);
    return block;
}

// Starts `count` threads, each with its number as its argument, and waits for all.
__attribute__((unused)) static void run_threads(int count, void *(*body)(void *)) {
    pthread_t *threads = (pthread_t *)get(sizeof(pthread_t) * (size_t)count);
#ifdef MANY
    many_body = body;
    body = many_run;
#endif
    for (long i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, body, (void *)i)) die("no thread");
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    free(threads);
}

static double monotonic(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double cpu_and_faults(long *faults) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    *faults = usage.ru_minflt + usage.ru_majflt;
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

// Prints the result, which is the same under every allocator. Then makes small calls for as long as
// the caller asked for, and prints the resident memory, and what these calls cost so that the
// measurement can subtract it.
__attribute__((unused)) static void finish(uint64_t result) {
#ifdef MANY
    many_mark(MANY_STOP);
    many_mark(MANY_REPORT);
#endif
    printf("result %llx\n", (unsigned long long)result);
    if (load_settle > 0) {
        long faults_before, faults, total = 0, resident = 0;
        double start = monotonic(), cpu = cpu_and_faults(&faults_before);
        while (monotonic() - start < load_settle) {
            for (int i = 0; i < 100; i++) free(get(16 + (size_t)(i % 8) * 16));
            usleep(5000);
        }
        FILE *file = fopen("/proc/self/statm", "r");
        if (!file || fscanf(file, "%ld %ld", &total, &resident) != 2)
            die("cannot read /proc/self/statm");
        fclose(file);
        cpu = cpu_and_faults(&faults) - cpu;
        printf("settled %ld %.6f %.6f %ld\n", resident * sysconf(_SC_PAGESIZE), monotonic() - start,
               cpu, faults - faults_before);
    }
    fflush(stdout);
    // Skips destructors and exit handlers, which are not part of the load.
    _exit(0);
}
#endif

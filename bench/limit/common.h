// Shared by the libraries: the parts of the malloc family that rest on others, and the report.
#ifndef LIMIT_COMMON_H
#define LIMIT_COMMON_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define HIDDEN __attribute__((visibility("hidden")))
#define QUICK __thread __attribute__((tls_model("initial-exec")))

// The variable that names the folder of recordings, plans and reports. The names of all folders
// have the same length, and so have the paths of the libraries: a program that copies its
// environment must allocate alike in each run.
#define FOLDER_VARIABLE "PINFOLD_LIMIT"

// glibc's own functions.
void *__libc_malloc(size_t size);
void *__libc_realloc(void *block, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

// Each library defines these four.
static void *allocate(size_t size, size_t alignment, int zeroed);
void free(void *block);
void *realloc(void *block, size_t size);
size_t malloc_usable_size(void *block);

void *aligned_alloc(size_t alignment, size_t size) { return allocate(size, alignment, 0); }
void *memalign(size_t alignment, size_t size) { return allocate(size, alignment, 0); }
void *valloc(size_t size) { return allocate(size, 4096, 0); }
void *pvalloc(size_t size) { return allocate((size + 4095) & ~(size_t)4095, 4096, 0); }
void cfree(void *block) { free(block); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || !alignment || (alignment & (alignment - 1))) return EINVAL;
    void *found = allocate(size, alignment, 0);
    if (!found) return ENOMEM;
    *block = found;
    return 0;
}

void *reallocarray(void *block, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, bytes);
}

static __attribute__((unused)) uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// Returns how many bytes of an area are resident.
static __attribute__((unused)) size_t resident(char *area, size_t length) {
    static unsigned char pages[1 << 16];
    size_t count = 0, step = sizeof pages * 4096;
    for (size_t from = 0; from < length; from += step) {
        size_t bytes = length - from < step ? length - from : step;
        if (mincore(area + from, bytes, pages)) return 0;
        for (size_t page = 0; page < (bytes + 4095) / 4096; page++) count += pages[page] & 1;
    }
    return count * 4096;
}

// Returns the peak of this process's resident memory.
static size_t peak(void) {
    char text[4096];
    int file = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    text[length < 0 ? 0 : length] = 0;
    const char *line = strstr(text, "VmHWM:");
    return line ? strtoul(line + 6, NULL, 10) * 1024 : 0;
}

// Writes PINFOLD_LIMIT/<process id>.out at the end of a process: the allocations that glibc served,
// the resident memory of the library's own and of glibc's heap, the peak of resident memory, and
// the time that the library took for what no allocator does. `begin` is when the report began.
static __attribute__((unused)) void write_report(uint64_t by_glibc, size_t own, uint64_t setup_ns,
                                                 uint64_t begin) {
    struct mallinfo2 fallen = by_glibc ? mallinfo2() : (struct mallinfo2){0};
    own += fallen.arena + fallen.hblkhd;
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.out", getenv(FOLDER_VARIABLE), (int)getpid());
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return;
    dprintf(file, "%llu %zu %zu %llu\n", (unsigned long long)by_glibc, own, peak(),
            (unsigned long long)(setup_ns + now() - begin));
    close(file);
}

// Called when the process ends. Defined by each library.
static void at_exit(void);

__attribute__((destructor)) static void ended(void) { at_exit(); }

void _exit(int status) {
    at_exit();
    for (;;) syscall(SYS_exit_group, status);
}

void _Exit(int status) { _exit(status); }
#endif

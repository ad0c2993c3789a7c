// Shared by the recorder and the oracle: how a process and its threads are named, so that a replay
// finds the plan that a recording led to.
//
// A process is named by a hash of its command line. The first thread that allocates has the name 1.
// Any other thread is named by its parent's name and by how many threads the parent started before,
// which does not depend on the order in which threads run. The names of threads that do not come
// from pthread_create are numbers in the order of their first call.
#ifndef LIMIT_COMMON_H
#define LIMIT_COMMON_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define HIDDEN __attribute__((visibility("hidden")))
#define QUICK __thread __attribute__((tls_model("initial-exec")))

// The variable that names the folder of recordings or plans. Both names have the same length, and
// so have the paths of both libraries: a program that copies its environment must allocate alike.
#define FOLDER_VARIABLE "PINFOLD_LIMIT"

// glibc's own functions, which serve what is not recorded or not planned.
void *__libc_malloc(size_t size);
void *__libc_realloc(void *block, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *block);

// Called around pthread_create. glibc allocates there for a new thread only if it has no ended
// thread's stack to use again, which depends on time. These blocks are not events.
static void pause_events(void);
static void resume_events(void);

// The name of this thread, 0 before its first call.
static QUICK uint64_t thread_name;
static QUICK uint64_t threads_started;

static uint64_t mix(uint64_t hash, uint64_t value) {
    for (int byte = 0; byte < 8; byte++)
        hash = (hash ^ ((value >> (8 * byte)) & 0xff)) * 0x100000001b3u;
    return hash;
}

// Returns this thread's name, and gives it one if it has none.
static uint64_t own_name(void) {
    static _Atomic uint64_t unnamed;
    if (!thread_name) {
        uint64_t before = atomic_fetch_add(&unnamed, 1);
        thread_name = before ? mix(0x5f2e, before) : 1;
    }
    return thread_name;
}

// Returns a hash of the command line.
static uint64_t process_name(void) {
    unsigned char text[1 << 12];
    uint64_t hash = 0xcbf29ce484222325u;
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length;
    while (file >= 0 && (length = read(file, text, sizeof text)) > 0)
        for (ssize_t at = 0; at < length; at++) hash = (hash ^ text[at]) * 0x100000001b3u;
    if (file >= 0) close(file);
    return hash;
}

// What a new thread runs. There is one for each thread, because a thread may start late.
struct start {
    void *(*body)(void *);
    void *argument;
    uint64_t name;
};
enum { STARTS = 1 << 17 };
static struct start starts[STARTS];

static void *named(void *at) {
    struct start *start = at;
    thread_name = start->name;
    return start->body(start->argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                   void *argument) {
    static int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    static _Atomic unsigned used;
    uint64_t name = mix(own_name(), ++threads_started);
    pause_events();
    if (!create) *(void **)&create = dlsym(RTLD_NEXT, "pthread_create");
    unsigned at = atomic_fetch_add(&used, 1);
    int result;
    if (at < STARTS) {
        starts[at] = (struct start){body, argument, name};
        result = create(thread, attributes, named, &starts[at]);
    } else {
        result = create(thread, attributes, body, argument);
    }
    resume_events();
    return result;
}

// The rest of the malloc family. Each library defines these four.
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
#endif

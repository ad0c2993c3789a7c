// How the recorder and the oracle name a process and its threads, so that a replay finds the plan
// that a recording led to.
//
// A process is named by a hash of its command line. The first thread that allocates has the name 1.
// Any other thread is named by its parent's name and by how many threads the parent started before,
// which does not depend on the order in which threads run. The names of threads that do not come
// from pthread_create are numbers in the order of their first call.
#ifndef LIMIT_NAMES_H
#define LIMIT_NAMES_H
#include "common.h"

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
#endif

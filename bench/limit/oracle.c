// The oracle: a library for LD_PRELOAD that gives each object the address that the plan has for it.
//
// The plan is PINFOLD_LIMIT/<process name>.plan: for each thread a list of entries, one for each
// expected call. A call takes the thread's next entry and compares it with the call. A thread whose
// call differs leaves the plan for the rest of its life, and glibc serves it. The report says how
// many allocations glibc has served. A process without a plan is served by glibc, too.
//
// There are two kinds of plans. Why each is sound, also if the run differs from the recorded one:
//
// - Plans of one thread. Frees are entries, too. So as long as the thread follows the plan, exactly
//   the objects are live that the plan has as live, and these do not overlap.
// - Plans of several threads. The arena is divided into slots, which never change. The word in front
//   of a slot's object counts the objects that were freed there. An entry says how many must have
//   been freed before. Only one entry of all threads waits for each count, and the count differs as
//   long as an object of the slot is live. If the slot is not free yet, glibc serves this call.
//
// Blocks outside the arena are glibc's.
#include "common.h"
#include <malloc.h>
#include <sys/syscall.h>
#include <time.h>

// An entry: bits 0 to 31 are the size, bit 32 says that nothing has used the memory before, bits 33
// to 61 are the place, in units of 16 bytes, and bits 62 and 63 are the kind. An allocation's kind
// is 0, so an entry of another kind equals no size that an allocator could serve.
typedef uint64_t entry;
#define SIZE ((entry)UINT32_MAX)
#define FRESH ((entry)1 << 32)
#define KIND ((entry)3 << 62)
#define REALLOCATE ((entry)2 << 62)
#define FREE ((entry)3 << 62)
#define END FREE  // place 0, where no object is

// The arena is always here, so that no call has to load its address.
#define BASE ((char *)0x200000000000)
#define SPAN ((size_t)8 << 30)

struct thread_plan {
    uint64_t name, first;
};
struct plan {
    uint64_t bytes;  // of the arena
    uint64_t threads, entries;
    uint32_t shared;  // whether the plan is of several threads
    uint32_t tagged;  // whether objects have tags
    uint32_t huge;    // whether the arena asks for huge pages
    uint32_t unused;
    struct thread_plan thread[];  // by name; then the entries, and the needs of a shared plan
};

// The words in front of an object, if the program asks for objects' sizes or the plan is shared.
struct tag {
    _Atomic uint32_t freed;
    uint32_t size;
};

static const entry end = END;
static QUICK const entry *next = &end;
static QUICK const entry *paused;
static QUICK int has_begun;  // whether this thread has looked for its plan

static const struct plan *plan;
static const entry *entries;
static const uint32_t *needs;  // of each entry: how many objects must have been freed there
static int shared, tagged;
static size_t plan_bytes;
static pid_t process;
static _Atomic int state;  // 0 before the start, 1 meanwhile, 2 after it
static _Atomic uint64_t unplanned;
static uint64_t setup_ns;

static void pause_events(void) {
    paused = next;
    next = &end;
}

static void resume_events(void) {
    next = paused;
    paused = NULL;
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// Maps the plan and the arena. Returns without a plan if there is none for this process.
static void map_plan(const char *folder) {
    char path[4096];
    struct stat about;
    snprintf(path, sizeof path, "%s/%016llx.plan", folder, (unsigned long long)process_name());
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *map = MAP_FAILED;
    if (!fstat(file, &about))
        map = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0);
    close(file);
    if (map == MAP_FAILED) return;
    const struct plan *found = map;
    if (mmap(BASE, found->bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) != BASE)
        return;
    if (found->huge) madvise(BASE, found->bytes, MADV_HUGEPAGE);
    plan_bytes = (size_t)about.st_size;
    entries = (const entry *)(found->thread + found->threads);
    needs = (const uint32_t *)(entries + found->entries);
    shared = (int)found->shared;
    tagged = (int)found->tagged;
    plan = found;
}

__attribute__((constructor)) static void start(void) {
    int before = 0;
    if (!atomic_compare_exchange_strong(&state, &before, 1)) return;
    uint64_t begin = now();
    const char *folder = getenv(FOLDER_VARIABLE);
    if (folder) map_plan(folder);
    process = getpid();
    setup_ns = now() - begin;
    atomic_store(&state, 2);
}

// Makes a thread follow its plan at its first call. Returns whether it has a plan.
static int begin_thread(void) {
    if (has_begun || paused) return 0;
    start();
    if (atomic_load(&state) != 2) return 0;
    has_begun = 1;
    if (!plan) return 0;
    uint64_t name = own_name(), low = 0, high = plan->threads;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (plan->thread[middle].name < name) low = middle + 1;
        else high = middle;
    }
    if (low == plan->threads || plan->thread[low].name != name) return 0;
    next = entries + plan->thread[low].first;
    return 1;
}

static void deviate(void) {
    if (!paused) next = &end;
}

static inline int in_arena(const void *block) { return (size_t)((char *)block - BASE) < SPAN; }
static inline char *place(entry at) { return BASE + ((at >> 29) & 0x1fffffff0); }
static inline entry free_entry(const void *block) {
    return FREE | (entry)((const char *)block - BASE) << 29;
}
static inline struct tag *tag_of(void *block) { return (struct tag *)block - 1; }

// Takes the slot of an entry, unless its last object is still live.
static inline int take(const entry *at, char *block, size_t size) {
    struct tag *tag = tag_of(block);
    if (shared && atomic_load_explicit(&tag->freed, memory_order_acquire) != needs[at - entries])
        return 0;
    tag->size = (uint32_t)size;
    return 1;
}

static inline void give(void *block) {
    struct tag *tag = tag_of(block);
    uint32_t freed = atomic_load_explicit(&tag->freed, memory_order_relaxed);
    atomic_store_explicit(&tag->freed, freed + 1, memory_order_release);
}

// Serves a call that has no place in the plan.
static void *unplanned_block(size_t size, size_t alignment, int zeroed) {
    if (!paused) atomic_fetch_add_explicit(&unplanned, 1, memory_order_relaxed);
    void *block = alignment > 16 ? __libc_memalign(alignment, size) : __libc_malloc(size);
    if (block && zeroed) memset(block, 0, size);
    return block;
}

static __attribute__((noinline)) void *other(size_t size, size_t alignment, int zeroed) {
    if (begin_thread()) return allocate(size, alignment, zeroed);
    // The planner leaves such sizes out.
    if (size <= SIZE) deviate();
    return unplanned_block(size, alignment, zeroed);
}

static inline __attribute__((always_inline)) void *planned(size_t size, size_t alignment,
                                                           int zeroed) {
    const entry *at = next;
    char *block = place(*at);
    if (UNLIKELY((*at & (SIZE | KIND)) != size || (size_t)block & (alignment - 1)))
        return other(size, alignment, zeroed);
    next = at + 1;
    if (UNLIKELY(tagged) && !take(at, block, size)) return unplanned_block(size, alignment, zeroed);
    if (zeroed && !(*at & FRESH)) memset(block, 0, size);
    return block;
}

static void *allocate(size_t size, size_t alignment, int zeroed) {
    return planned(size, alignment, zeroed);
}

void *malloc(size_t size) { return planned(size, 1, 0); }

void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return planned(bytes, 1, 1);
}

void free(void *block) {
    if (UNLIKELY(!in_arena(block))) {
        __libc_free(block);
        return;
    }
    if (shared) {
        give(block);
        return;
    }
    const entry *at = next;
    if (LIKELY(*at == free_entry(block))) next = at + 1;
    else deviate();
}

// Moves an object of the arena to a block of its own, outside the plan.
static void *move_out(void *block, size_t size) {
    char *moved = unplanned_block(size, 1, 0);
    if (!moved) return NULL;
    size_t most = (size_t)(BASE + plan->bytes - (char *)block);
    if (tagged) most = tag_of(block)->size;
    memcpy(moved, block, most < size ? most : size);
    if (shared) give(block);
    return moved;
}

void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    if (!size) {
        free(block);
        return NULL;
    }
    if (!in_arena(block)) return __libc_realloc(block, size);
    const entry *at = next;
    char *moved = place(*at);
    if (UNLIKELY((*at & (SIZE | KIND)) != (size | REALLOCATE))) {
        if (begin_thread()) return realloc(block, size);
        deviate();
        return move_out(block, size);
    }
    if (moved == block) {
        next = at + 1;
        if (tagged) tag_of(block)->size = (uint32_t)size;
        return block;
    }
    if (shared) {
        next = at + 1;
        if (!take(at, moved, size)) return move_out(block, size);
        size_t most = tag_of(block)->size;
        memcpy(moved, block, most < size ? most : size);
        give(block);
        return moved;
    }
    // An object of a plan for one thread moves only if its size shrinks.
    if (at[1] != free_entry(block)) {
        deviate();
        return move_out(block, size);
    }
    next = at + 2;
    if (tagged) tag_of(moved)->size = (uint32_t)size;
    memcpy(moved, block, size);
    return moved;
}

size_t malloc_usable_size(void *block) {
    static size_t (*usable)(void *);
    if (!block) return 0;
    if (in_arena(block)) return tagged ? tag_of(block)->size : 0;
    if (!usable) *(void **)&usable = dlsym(RTLD_NEXT, "malloc_usable_size");
    return usable(block);
}

// Returns how many bytes of the arena are resident.
static size_t resident(void) {
    static unsigned char pages[1 << 16];
    size_t count = 0, step = sizeof pages * 4096;
    for (size_t from = 0; plan && from < plan->bytes; from += step) {
        size_t bytes = plan->bytes - from < step ? plan->bytes - from : step;
        if (mincore(BASE + from, bytes, pages)) return 0;
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

// Writes PINFOLD_LIMIT/<process id>.out: the allocations that the plan did not serve, the resident
// memory of the arena and the plan and of glibc's heap, the peak of resident memory, and the time
// that mapping the plan and writing this report took.
__attribute__((destructor)) static void report(void) {
    static _Atomic int reported;
    const char *folder = getenv(FOLDER_VARIABLE);
    if (!folder || getpid() != process || atomic_exchange(&reported, 1)) return;
    uint64_t begin = now(), missed = atomic_load(&unplanned);
    struct mallinfo2 fallen = missed ? mallinfo2() : (struct mallinfo2){0};
    size_t own = resident() + plan_bytes + fallen.arena + fallen.hblkhd;
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.out", folder, (int)process);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return;
    dprintf(file, "%llu %zu %zu %llu\n", (unsigned long long)missed, own, peak(),
            (unsigned long long)(setup_ns + now() - begin));
    close(file);
}

void _exit(int status) {
    report();
    for (;;) syscall(SYS_exit_group, status);
}

void _Exit(int status) { _exit(status); }

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
// - Plans of several threads. The arena is divided into slots, which never change. The tag in front
//   of a slot's object says whether it is live. An entry whose slot is not free yet is served by
//   glibc. Only the thread that a slot was made for takes the slot, or, if the slot is contested,
//   any thread by an atomic exchange. Any thread may free the object: only the caller of free has a
//   live object.
//
// Blocks outside the arena are glibc's.
#include "names.h"

// An entry: bits 0 to 31 are the size. Bit 32 is FRESH. Bit 33 says that several threads take the
// slot. Bits 34 to 61 are the place, in units of 16 bytes, and bits 62 and 63 are the kind. An
// allocation's kind is 0, so an entry of another kind equals no size that an allocator could serve.
typedef uint64_t entry;
#define SIZE ((entry)UINT32_MAX)
// Of an allocation: nothing has used the memory before. Of a reallocation: the object stays.
#define FRESH ((entry)1 << 32)
#define CONTESTED ((entry)1 << 33)
#define KIND ((entry)3 << 62)
#define REALLOCATE ((entry)2 << 62)
#define FREE ((entry)3 << 62)
#define END FREE  // place 0, where no object is

// The arena is always here, so that no call has to load its address.
#define BASE ((char *)0x200000000000)
#define SPAN ((size_t)4 << 30)

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
    struct thread_plan thread[];  // by name; then the entries
};

// The words in front of an object, if the program asks for objects' sizes or the plan is shared.
struct tag {
    _Atomic uint32_t live;
    uint32_t size;
};

static const entry end = END;
static QUICK const entry *next = &end;
static QUICK const entry *paused;
static QUICK int has_begun;  // whether this thread has looked for its plan

static const struct plan *plan;
static const entry *entries;
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

// Maps the plan and the arena. Maps nothing in a process that has no plan.
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
static inline char *place(entry at) { return BASE + ((at >> 30) & 0xfffffff0); }
static inline entry free_entry(const void *block) {
    return FREE | (entry)((const char *)block - BASE) << 30;
}
static inline struct tag *tag_of(void *block) { return (struct tag *)block - 1; }

// Takes the slot of an entry, unless its last object is still live.
static inline int take(entry at, char *block, size_t size) {
    struct tag *tag = tag_of(block);
    if (shared) {
        if (UNLIKELY(at & CONTESTED)) {
            if (atomic_exchange_explicit(&tag->live, 1, memory_order_acquire)) return 0;
        } else {
            if (atomic_load_explicit(&tag->live, memory_order_acquire)) return 0;
            atomic_store_explicit(&tag->live, 1, memory_order_relaxed);
        }
    }
    tag->size = (uint32_t)size;
    return 1;
}

static inline void give(void *block) {
    atomic_store_explicit(&tag_of(block)->live, 0, memory_order_release);
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
    if (UNLIKELY(tagged) && !take(*at, block, size)) return unplanned_block(size, alignment, zeroed);
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
        if (*at & FRESH || !take(*at, moved, size)) return move_out(block, size);
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

static void at_exit(void) {
    static _Atomic int reported;
    if (!getenv(FOLDER_VARIABLE) || getpid() != process || atomic_exchange(&reported, 1)) return;
    uint64_t begin = now();
    size_t own = plan ? resident(BASE, plan->bytes) + plan_bytes : 0;
    write_report(atomic_load(&unplanned), own, setup_ns, begin);
}

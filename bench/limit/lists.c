// The allocator without bookkeeping: a library for LD_PRELOAD that keeps a list of free objects for
// each thread and size, and does nothing else. It has no checks, and never gives memory back. It
// needs no plan, so it also serves programs whose calls depend on addresses or on time.
//
// A tag in front of each object has the number of its list, and the thread that allocated it. A
// thread that frees its own object pushes it onto its list, without atomics. Objects of other
// threads gather in a chain. A chain of 64 goes to the list that all threads share, and so does all
// that a thread has when it ends. A thread whose list is empty takes the whole shared list. So the
// shared list needs only an atomic exchange, and a compare-exchange that cannot take a stale head.
//
// Sizes below 1 KiB have a list for each 16 bytes, and larger ones have eight lists for each power
// of two.
#include "common.h"

enum { UNIT = 16, EXACT = 64, LISTS = EXACT + 8 * 24 };
#define CHUNK ((size_t)1 << 18)
#define SPAN ((size_t)16 << 30)
#define BASE ((char *)0x200000000000)

struct object {
    struct object *next;
};
// The words in front of an object.
struct tag {
    uint32_t size;
    uint32_t place;  // the number of the list, and above its 8 bits that of the thread
};
_Static_assert(LISTS == 256, "the number of a list has 8 bits");

// Objects of other threads that this thread has freed.
struct chain {
    struct object *first, *last;
    unsigned length;
};
enum { MOST = 64 };

static QUICK struct object *lists[LISTS];
static QUICK struct chain chains[LISTS];
// This thread's number, as in a tag. 0 until the thread first takes memory.
static QUICK uint32_t own;
static struct object *_Atomic shared[LISTS];
static pthread_key_t at_thread_end;
// The unused rest of this thread's chunk.
static QUICK char *chunk, *chunk_end;
static _Atomic size_t used;  // of the arena
static _Atomic uint64_t by_glibc;
static pid_t process;

static void share(size_t list, struct object *first, struct object *last) {
    struct object *head = atomic_load_explicit(&shared[list], memory_order_relaxed);
    do last->next = head;
    while (!atomic_compare_exchange_weak_explicit(&shared[list], &head, first,
                                                  memory_order_release, memory_order_relaxed));
}

static void end_thread(void *unused) {
    (void)unused;
    for (size_t list = 0; list < LISTS; list++) {
        struct object *last = lists[list];
        while (last && last->next) last = last->next;
        if (last) share(list, lists[list], last);
        if (chains[list].first) share(list, chains[list].first, chains[list].last);
        lists[list] = NULL;
        chains[list] = (struct chain){0};
    }
}

static void map(void) {
    void *at = mmap(BASE, SPAN, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (at != BASE) abort();
    const char *folder = getenv(FOLDER_VARIABLE);
    if (folder && strstr(folder, "huge")) madvise(BASE, SPAN, MADV_HUGEPAGE);
    process = getpid();
    pthread_key_create(&at_thread_end, end_thread);
}

static inline int in_arena(const void *block) { return (size_t)((char *)block - BASE) < SPAN; }
static inline struct tag *tag_of(void *block) { return (struct tag *)block - 1; }

// Returns the list of objects of `units` units, and makes `units` the units of the list's objects.
static inline size_t list_of(size_t *units) {
    if (LIKELY(*units < EXACT)) return *units;
    unsigned shift = 63 - (unsigned)__builtin_clzl(*units) - 3;
    size_t eighths = (*units + ((size_t)1 << shift) - 1) >> shift;
    *units = eighths << shift;
    // From 8 to 16 eighths.
    return EXACT + (shift - 3) * 8 + (eighths - 8);
}

static inline void *tagged(void *block, size_t list, size_t size) {
    *tag_of(block) = (struct tag){(uint32_t)size, own | (uint32_t)list};
    return block;
}

// Makes an object from the shared list, or from memory that nothing has used. `zeroed` is set to 0
// if the memory is known to be zero.
static __attribute__((noinline)) void *fresh(size_t units, size_t list, size_t size, int *zeroed) {
    static _Atomic uint32_t threads;
    if (!own) {
        if (!atomic_load(&used)) map();
        own = (atomic_fetch_add(&threads, 1) + 1) << 8;
        pthread_setspecific(at_thread_end, &own);
    }
    struct object *first = NULL;
    if (atomic_load_explicit(&shared[list], memory_order_relaxed))
        first = atomic_exchange_explicit(&shared[list], NULL, memory_order_acquire);
    if (first) {
        lists[list] = first->next;
        return tagged(first, list, size);
    }
    size_t bytes = units * UNIT;
    char *block;
    if (bytes > CHUNK / 8) {
        // Whole pages, with the tag in the first line.
        bytes = (bytes + 4095 + 64) & ~(size_t)4095;
        size_t at = atomic_fetch_add(&used, bytes);
        if (at + bytes > SPAN) return NULL;
        block = BASE + at + 64;
    } else {
        if ((size_t)(chunk_end - chunk) < bytes) {
            size_t at = atomic_fetch_add(&used, CHUNK);
            if (at + CHUNK > SPAN) return NULL;
            // An object begins 8 bytes after its tag.
            chunk = BASE + at + 16;
            chunk_end = BASE + at + CHUNK + 8;
        }
        block = chunk;
        chunk += bytes;
    }
    *zeroed = 0;
    return tagged(block, list, size);
}

static __attribute__((noinline)) void *from_glibc(size_t size, size_t alignment, int zeroed) {
    atomic_fetch_add_explicit(&by_glibc, 1, memory_order_relaxed);
    void *block = alignment > UNIT ? __libc_memalign(alignment, size) : __libc_malloc(size);
    if (block && zeroed) memset(block, 0, size);
    return block;
}

// Serves `size` bytes with room for `room`.
static inline __attribute__((always_inline)) void *serve(size_t size, size_t room, int zeroed) {
    if (UNLIKELY(room >= (size_t)1 << 31)) return from_glibc(size, UNIT, zeroed);
    size_t units = (room + sizeof(struct tag) + UNIT - 1) / UNIT;
    size_t list = list_of(&units);
    struct object *object = lists[list];
    if (LIKELY(object != NULL)) {
        lists[list] = object->next;
        if (zeroed) memset(object, 0, size);
        return tagged(object, list, size);
    }
    int dirty = 1;
    void *block = fresh(units, list, size, &dirty);
    if (!block) return from_glibc(size, UNIT, zeroed);
    return zeroed && dirty ? memset(block, 0, size) : block;
}

void *malloc(size_t size) { return serve(size, size, 0); }

void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return serve(bytes, bytes, 1);
}

static void *allocate(size_t size, size_t alignment, int zeroed) {
    // Few programs ask for alignments often. Objects of whole pages begin at a multiple of 64.
    if (alignment <= UNIT || (alignment <= 64 && size > CHUNK / 8)) return serve(size, size, zeroed);
    return from_glibc(size, alignment, zeroed);
}

static __attribute__((noinline)) void free_of_other(struct object *object) {
    size_t list = tag_of(object)->place % LISTS;
    struct chain *chain = &chains[list];
    object->next = chain->first;
    if (!chain->first) chain->last = object;
    chain->first = object;
    if (++chain->length < MOST) return;
    share(list, chain->first, chain->last);
    *chain = (struct chain){0};
}

void free(void *block) {
    if (UNLIKELY(!in_arena(block))) {
        __libc_free(block);
        return;
    }
    struct object *object = block;
    // Less than 256 only if the thread is this one.
    uint32_t list = tag_of(block)->place ^ own;
    if (LIKELY(list < LISTS)) {
        object->next = lists[list];
        lists[list] = object;
    } else {
        free_of_other(object);
    }
}

void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    if (!size) {
        free(block);
        return NULL;
    }
    if (!in_arena(block)) return __libc_realloc(block, size);
    struct tag *tag = tag_of(block);
    size_t units = (size + sizeof(struct tag) + UNIT - 1) / UNIT;
    if (size < (size_t)1 << 31 && list_of(&units) == tag->place % LISTS) {
        tag->size = (uint32_t)size;
        return block;
    }
    // What grows once often grows again.
    void *moved = serve(size, size > tag->size ? size * 2 : size, 0);
    if (!moved) return NULL;
    memcpy(moved, block, tag->size < size ? tag->size : size);
    free(block);
    return moved;
}

size_t malloc_usable_size(void *block) {
    static size_t (*usable)(void *);
    if (!block) return 0;
    if (in_arena(block)) return tag_of(block)->size;
    if (!usable) *(void **)&usable = dlsym(RTLD_NEXT, "malloc_usable_size");
    return usable(block);
}

static void at_exit(void) {
    static _Atomic int reported;
    if (!getenv(FOLDER_VARIABLE) || getpid() != process || atomic_exchange(&reported, 1)) return;
    uint64_t begin = now();
    size_t end = atomic_load(&used);
    write_report(atomic_load(&by_glibc), resident(BASE, end < SPAN ? end : SPAN), 0, begin);
}

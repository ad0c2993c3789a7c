// The allocator without bookkeeping: a library for LD_PRELOAD that keeps a list of free objects for
// each thread and size, and does nothing else. It has no locks, no slow path, no checks, and never
// gives memory back. An object goes to the list of the thread that frees it, so no two threads ever
// touch the same list. The library needs no plan, so it also serves programs whose calls depend on
// addresses or on time.
//
// A tag in front of each object has the number of its list. Sizes up to 1 KiB have a list for each
// 16 bytes, and larger ones have eight lists for each power of two.
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
    uint32_t list, size;
};

static QUICK struct object *lists[LISTS];
// The unused rest of this thread's chunk.
static QUICK char *chunk, *chunk_end;
static _Atomic size_t used;  // of the arena
static _Atomic uint64_t by_glibc;
static pid_t process;

static void map(void) {
    void *at = mmap(BASE, SPAN, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (at != BASE) abort();
    const char *folder = getenv(FOLDER_VARIABLE);
    if (folder && strstr(folder, "huge")) madvise(BASE, SPAN, MADV_HUGEPAGE);
    process = getpid();
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

// Makes an object from memory that nothing has used.
static __attribute__((noinline)) void *fresh(size_t units, size_t list, size_t size) {
    size_t bytes = units * UNIT;
    char *block;
    if (bytes > CHUNK / 8) {
        // Whole pages, with the tag in front of the first one.
        bytes = (bytes + 4095 + 64) & ~(size_t)4095;
        size_t at = atomic_fetch_add(&used, bytes);
        if (!at) map();
        block = at + bytes <= SPAN ? BASE + at + 64 : NULL;
    } else {
        if ((size_t)(chunk_end - chunk) < bytes) {
            size_t at = atomic_fetch_add(&used, CHUNK);
            if (!at) map();
            if (at + CHUNK > SPAN) return NULL;
            // An object begins 8 bytes after its tag.
            chunk = BASE + at + 16;
            chunk_end = BASE + at + CHUNK + 8;
        }
        block = chunk;
        chunk += bytes;
    }
    if (block) *tag_of(block) = (struct tag){(uint32_t)list, (uint32_t)size};
    return block;
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
        tag_of(object)->size = (uint32_t)size;
        if (zeroed) memset(object, 0, size);
        return object;
    }
    void *block = fresh(units, list, size);
    return block ? block : from_glibc(size, UNIT, zeroed);
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

void free(void *block) {
    if (UNLIKELY(!in_arena(block))) {
        __libc_free(block);
        return;
    }
    struct object *object = block, **list = &lists[tag_of(block)->list];
    object->next = *list;
    *list = object;
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
    if (size < (size_t)1 << 31 && list_of(&units) == tag->list) {
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

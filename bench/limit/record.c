// The recorder: a library for LD_PRELOAD that writes down each call of the malloc family.
//
// Each process writes a file of its own, PINFOLD_LIMIT/<process id>.rec: a header, and then an
// event of 16 bytes for each call. An atomic counter orders the events of all threads: an
// allocation takes its number after it has the memory, and a free before it gives the memory back.
// So the events of objects that were at the same address never overlap. The file ends with empty
// events, which have no alignment. The number of its allocation names an object. A small head in
// front of each object holds that name.
//
// A child of fork that does not exec is not recorded.
#include "names.h"

enum kind { ALLOCATE, REALLOCATE, FREE };

struct event {
    uint32_t object;  // of a reallocation or a free
    uint16_t thread;  // an index of `names`
    uint8_t kind, log_alignment;
    uint64_t size;
};
enum { THREADS = 1 << 15, EVENTS = 1 << 27 };
struct recording {
    uint64_t process, uses_size;
    uint64_t names[THREADS];
    struct event event[EVENTS];
};

// The head in front of an object.
struct head {
    uint64_t size;
    uint32_t object;
    uint32_t offset;  // from glibc's block
};
enum { UNRECORDED = UINT32_MAX };

static struct recording *recording;
static _Atomic uint64_t threads, events;
static _Atomic int state;  // 0 before the start, 1 meanwhile, 2 while recording, 3 not recording
static QUICK unsigned thread_number;  // one more than the index of `names`
static QUICK int paused;

static void pause_events(void) { paused++; }
static void resume_events(void) { paused--; }
static void forked(void) { atomic_store(&state, 3); }

__attribute__((constructor)) static void start(void) {
    int before = 0;
    if (!atomic_compare_exchange_strong(&state, &before, 1)) return;
    const char *folder = getenv(FOLDER_VARIABLE);
    char path[4096];
    int file = -1;
    if (folder) {
        snprintf(path, sizeof path, "%s/%d.rec", folder, (int)getpid());
        file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    }
    void *map = MAP_FAILED;
    if (file >= 0 && !ftruncate(file, sizeof(struct recording)))
        map = mmap(NULL, sizeof(struct recording), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (map == MAP_FAILED) {
        atomic_store(&state, 3);
        return;
    }
    recording = map;
    recording->process = process_name();
    pthread_atfork(NULL, NULL, forked);
    atomic_store(&state, 2);
}

// Adds an event, and returns its number.
static uint32_t add(enum kind kind, uint32_t object, size_t size, size_t alignment) {
    if (UNLIKELY(!atomic_load_explicit(&state, memory_order_acquire))) start();
    if (atomic_load_explicit(&state, memory_order_acquire) != 2 || paused) return UNRECORDED;
    if (UNLIKELY(!thread_number)) {
        uint64_t number = atomic_fetch_add(&threads, 1);
        if (number >= THREADS) return UNRECORDED;
        recording->names[number] = own_name();
        thread_number = (unsigned)number + 1;
    }
    uint64_t at = atomic_fetch_add(&events, 1);
    if (at >= EVENTS) return UNRECORDED;
    recording->event[at] = (struct event){object, (uint16_t)(thread_number - 1), (uint8_t)kind,
                                          (uint8_t)__builtin_ctzl(alignment), size};
    return (uint32_t)at;
}

static struct head *head_of(void *block) { return (struct head *)block - 1; }

static void *allocate(size_t size, size_t alignment, int zeroed) {
    if (alignment < sizeof(struct head)) alignment = sizeof(struct head);
    size_t bytes;
    if (__builtin_add_overflow(size, alignment, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    char *base = __libc_memalign(alignment, bytes);
    if (!base) return NULL;
    char *block = base + alignment;
    if (zeroed) memset(block, 0, size);
    uint32_t object = add(ALLOCATE, 0, size, alignment);
    *head_of(block) = (struct head){size, object, (uint32_t)alignment};
    return block;
}

void *malloc(size_t size) { return allocate(size, 16, 0); }

void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return allocate(bytes, 16, 1);
}

void free(void *block) {
    if (!block) return;
    struct head *head = head_of(block);
    if (head->object != UNRECORDED) add(FREE, head->object, 0, 16);
    __libc_free((char *)block - head->offset);
}

void *realloc(void *block, size_t size) {
    if (!block) return malloc(size);
    if (!size) {
        free(block);
        return NULL;
    }
    struct head old = *head_of(block);
    if (old.object != UNRECORDED) add(REALLOCATE, old.object, size, 16);
    if (size > SIZE_MAX - 16) {
        errno = ENOMEM;
        return NULL;
    }
    char *base = __libc_memalign(16, size + 16);
    if (!base) return NULL;
    char *grown = base + 16;
    memcpy(grown, block, old.size < size ? old.size : size);
    *head_of(grown) = (struct head){size, old.object, 16};
    __libc_free((char *)block - old.offset);
    return grown;
}

size_t malloc_usable_size(void *block) {
    if (!block) return 0;
    if (recording) recording->uses_size = 1;
    return head_of(block)->size;
}

// A recording is complete after each event.
static void at_exit(void) {}

// Times every single call of malloc and free, and tells what else happened during long calls.
//
//     latency THREADS SECONDS
//
// Each thread holds thousands of blocks. Their number grows and shrinks in waves, with pauses in
// between, so that allocators also return memory. Half of the blocks are freed soon, the others in
// random order, and one in 16 by a neighbouring thread. The first wave is not recorded.
//
// Calls are made in batches. Between two batches the thread writes to its new blocks, and reads its
// counts of context switches, page faults and system calls. So whatever these counts show after a
// long call happened during that call, or during the few short calls before it in the same batch.
//
// The load prints one line of JSON. Times in it are ticks of the clock.
#include "load.h"
#include <linux/perf_event.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { BATCH = 16, LOW = 5000, HIGH = 40000, BIG = 4, MOST = BIG * HIGH + BATCH, RING = 1024 };
enum { PARTS = 64, BUCKETS = 40 * PARTS, NOTES = 16 };
// Nanoseconds: calls beyond the first limit are explained, and those beyond the second are counted.
static const double EXPLAINED = 20e3, COUNTED = 50e3;

enum op { MALLOC, FREE, FREE_OTHER, CLOCK, OPS };
static const char *const op_names[OPS] = {"malloc", "free", "free_other", "clock"};

// What explains a long call: the first of these that applies. `OWN` is time in user space. It
// includes interrupts, because the system counts them as the thread's own time.
enum cause { PREEMPTED, WAITED, STOLEN, CALLS, FAULTS, OWN, CAUSES };
static const char *const cause_names[CAUSES] = {"preempted",    "waited", "stolen",
                                                "system_calls", "faults", "own"};

// A thread's counts at one moment.
struct state {
    uint64_t at, cpu_ns, calls;
    long waits, preemptions, faults;
};

// A long call.
struct note {
    uint64_t took, off_ns, calls;
    size_t size;
    long waits, preemptions, faults;
    enum op op;
    enum cause cause;
};

// Blocks that one thread hands to another one to free.
struct ring {
    _Alignas(128) size_t put;
    _Alignas(128) size_t taken;
    void *blocks[RING];
};

struct thread {
    struct ring inbox;
    struct ring *neighbour;
    uint64_t random;
    int recorded, counter;
    struct state before;
    // Log-linear: `PARTS` buckets for each power of two.
    uint64_t counts[OPS][BUCKETS];
    uint64_t longest_unexplained[OPS], longest[OPS][CAUSES], above[OPS][CAUSES];
    // The longest calls during which the thread ran, and the longest others.
    struct note notes[2][NOTES];
    size_t live_count;
    void *live[MOST];
};

static struct thread *threads;
static double seconds_to_run, ns_per_tick;
static uint64_t explained, counted;
static size_t high = HIGH;

// Reads the clock. No timed instruction moves past it.
static inline uint64_t ticks(void) {
#if defined(__x86_64__)
    uint32_t low, upper, cpu;
    __asm__ volatile("rdtscp\n\tlfence" : "=a"(low), "=d"(upper), "=c"(cpu)::"memory");
    return (uint64_t)upper << 32 | low;
#elif defined(__aarch64__)
    uint64_t now;
    __asm__ volatile("isb\n\tmrs %0, cntvct_el0\n\tisb" : "=r"(now)::"memory");
    return now;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
#endif
}

static void calibrate(void) {
    double start = monotonic(), end;
    uint64_t from = ticks();
    while ((end = monotonic()) - start < 0.05) {
    }
    ns_per_tick = (end - start) * 1e9 / (double)(ticks() - from);
    explained = (uint64_t)(EXPLAINED / ns_per_tick);
    counted = (uint64_t)(COUNTED / ns_per_tick);
}

// Returns a counter of this thread's system calls, or -1 if the system has none for this user.
static int count_calls(void) {
    struct perf_event_attr attr = {.type = PERF_TYPE_TRACEPOINT, .size = sizeof attr};
    FILE *file = fopen("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id", "r");
    int found = file && fscanf(file, "%llu", (unsigned long long *)&attr.config) == 1;
    if (file) fclose(file);
    return found ? (int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC) : -1;
}

// Reads the thread's counts. Makes `LOOK_CALLS` system calls if there is a counter for them.
enum { LOOK_CALLS = 3 };
static struct state look(const struct thread *self) {
    struct state now = {0};
    struct rusage usage;
    struct timespec cpu;
    if (self->counter >= 0 && read(self->counter, &now.calls, sizeof now.calls) < 0)
        die("cannot read the counter of system calls");
    getrusage(RUSAGE_THREAD, &usage);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    now.at = ticks();
    now.cpu_ns = (uint64_t)cpu.tv_sec * 1000000000 + (uint64_t)cpu.tv_nsec;
    now.waits = usage.ru_nvcsw;
    now.preemptions = usage.ru_nivcsw;
    now.faults = usage.ru_minflt + usage.ru_majflt;
    return now;
}

static enum cause cause_of(const struct note *note) {
    if ((double)note->off_ns * 2 >= (double)note->took * ns_per_tick)
        return note->preemptions ? PREEMPTED : note->waits ? WAITED : STOLEN;
    return note->calls ? CALLS : note->faults ? FAULTS : OWN;
}

// Finds out what happened during a long call, and notes the call if it is among the longest.
static void explain(struct thread *self, enum op op, size_t size, uint64_t took) {
    struct state now = look(self), *before = &self->before;
    double wall_ns = (double)(now.at - before->at) * ns_per_tick;
    double off_ns = wall_ns - (double)(now.cpu_ns - before->cpu_ns);
    struct note note = {.op = op,
                        .size = size,
                        .took = took,
                        .off_ns = off_ns > 0 ? (uint64_t)off_ns : 0,
                        .waits = now.waits - before->waits,
                        .preemptions = now.preemptions - before->preemptions,
                        .faults = now.faults - before->faults};
    if (self->counter >= 0) note.calls = now.calls - before->calls - LOOK_CALLS;
    note.cause = cause_of(&note);
    self->above[op][note.cause] += took > counted;
    if (took > self->longest[op][note.cause]) self->longest[op][note.cause] = took;
    struct note *notes = self->notes[note.cause >= CALLS], *least = notes;
    for (int i = 1; i < NOTES; i++)
        if (notes[i].took < least->took) least = &notes[i];
    if (took > least->took) *least = note;
    self->before = look(self);
}

static size_t bucket_of(uint64_t took) {
    if (took < PARTS) return took;
    unsigned above = 63 - (unsigned)__builtin_clzll(took) - 6;
    size_t bucket = (above + 1) * PARTS + ((took >> above) & (PARTS - 1));
    return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

// Returns the middle of a bucket.
static uint64_t ticks_of(size_t bucket) {
    if (bucket < PARTS) return bucket;
    unsigned above = (unsigned)(bucket / PARTS) - 1;
    return ((PARTS + bucket % PARTS) << above) + ((1u << above) >> 1);
}

static void record(struct thread *self, enum op op, size_t size, uint64_t took) {
    if (!self->recorded) return;
    self->counts[op][bucket_of(took)]++;
    if (took > explained)
        explain(self, op, size, took);
    else if (took > self->longest_unexplained[op])
        self->longest_unexplained[op] = took;
}

// Returns a size from 16 bytes to 64 KiB, each power of two half as likely as the one below it, or
// once in 5,000 calls a size from 128 KiB to 4 MiB.
static size_t some_size(uint64_t *random) {
    if (below(random, 5000) == 0) return log_size(random, 128 * KIB, 4 * MIB);
    size_t least = (size_t)16 << __builtin_ctz(draw(random) | 1u << 11);
    return least + below(random, least);
}

static void timed_free(struct thread *self, enum op op, void *block) {
    uint64_t start = ticks();
    free(block);
    record(self, op, 0, ticks() - start);
}

// Hands a block to the neighbour. Returns 0 if the neighbour has too many blocks already.
static int hand_over(struct thread *self, void *block) {
    struct ring *ring = self->neighbour;
    if (ring->put - __atomic_load_n(&ring->taken, __ATOMIC_ACQUIRE) == RING) return 0;
    ring->blocks[ring->put % RING] = block;
    __atomic_store_n(&ring->put, ring->put + 1, __ATOMIC_RELEASE);
    return 1;
}

static void free_handed_over(struct thread *self, size_t most) {
    struct ring *ring = &self->inbox;
    size_t put = __atomic_load_n(&ring->put, __ATOMIC_ACQUIRE), taken = ring->taken;
    for (; taken < put && most > 0; taken++, most--) {
        timed_free(self, FREE_OTHER, ring->blocks[taken % RING]);
        __atomic_store_n(&ring->taken, taken + 1, __ATOMIC_RELEASE);
    }
}

// Frees the newest block, or any other one, each as often as the other.
static void free_one(struct thread *self) {
    size_t last = --self->live_count;
    size_t at = draw(&self->random) & 1 ? last : below(&self->random, last + 1);
    void *block = self->live[at];
    self->live[at] = self->live[last];
    if (load_threads == 1 || below(&self->random, 16) || !hand_over(self, block))
        timed_free(self, FREE, block);
}

// Makes `BATCH` calls, of which about `allocations` allocate.
static void batch(struct thread *self, unsigned allocations) {
    char *fresh[BATCH];
    size_t sizes[BATCH];
    int made = 0;
    self->before = look(self);
    free_handed_over(self, 4);
    for (int i = 0; i < BATCH; i++) {
        if (below(&self->random, BATCH) < allocations || self->live_count == 0) {
            size_t size = some_size(&self->random);
            uint64_t start = ticks();
            char *block = (char *)malloc(size);
            uint64_t took = ticks() - start;
            if (!block) die("no memory");
            record(self, MALLOC, size, took);
            fresh[made] = block;
            sizes[made++] = size;
        } else {
            free_one(self);
        }
        uint64_t start = ticks();
        record(self, CLOCK, 0, ticks() - start);
    }
    for (int i = 0; i < made; i++) {
        for (size_t at = 0; at < sizes[i]; at += 4096) fresh[i][at] = 1;
        fresh[i][sizes[i] - 1] = 1;
        self->live[self->live_count++] = fresh[i];
    }
}

static void churn(struct thread *self, size_t calls) {
    for (size_t i = 0; i < calls / BATCH; i++)
        batch(self, self->live_count + BATCH < MOST ? BATCH / 2 : 0);
}

static void *work(void *number) {
    struct thread *self = &threads[(long)number];
    self->random = seed((uint64_t)number);
    self->neighbour = &threads[((long)number + 1) % load_threads].inbox;
    self->counter = count_calls();
    double end = monotonic() + seconds_to_run;
    for (int wave = 0; monotonic() < end || wave < 2; wave++) {
        self->recorded = wave > 0;
        size_t most = wave % 8 == 1 ? BIG * high : high;
        while (self->live_count < most) batch(self, BATCH * 3 / 4);
        churn(self, 2 * high);
        while (self->live_count > LOW) batch(self, BATCH / 4);
        churn(self, high / 2);
        usleep((useconds_t)(1000 + below(&self->random, 20000)));
    }
    self->recorded = 0;
    while (self->live_count > 0) free_one(self);
    return NULL;
}

static void print_op(enum op op) {
    const char *comma = "";
    uint64_t unexplained = 0;
    printf("%s\"%s\":{\"buckets\":[", op ? "," : "", op_names[op]);
    for (size_t bucket = 0; bucket < BUCKETS; bucket++) {
        uint64_t count = 0;
        for (int i = 0; i < load_threads; i++) count += threads[i].counts[op][bucket];
        if (count) printf("%s[%lu,%lu]", comma, ticks_of(bucket), count), comma = ",";
    }
    for (int i = 0; i < load_threads; i++)
        if (threads[i].longest_unexplained[op] > unexplained)
            unexplained = threads[i].longest_unexplained[op];
    printf("],\"longest_unexplained\":%lu,\"causes\":{", unexplained);
    for (int cause = 0; cause < CAUSES; cause++) {
        uint64_t above = 0, longest = 0;
        for (int i = 0; i < load_threads; i++) {
            above += threads[i].above[op][cause];
            if (threads[i].longest[op][cause] > longest) longest = threads[i].longest[op][cause];
        }
        printf("%s\"%s\":{\"above\":%lu,\"longest\":%lu}", cause ? "," : "", cause_names[cause],
               above, longest);
    }
    printf("}}");
}

static void print_notes(void) {
    const char *comma = "";
    for (int i = 0; i < load_threads * 2 * NOTES; i++) {
        const struct note *note = &threads[i / (2 * NOTES)].notes[i / NOTES % 2][i % NOTES];
        if (!note->took) continue;
        printf("%s{\"op\":\"%s\",\"cause\":\"%s\",\"size\":%zu,\"us\":%.1f,\"off_cpu_us\":%.1f,"
               "\"preemptions\":%ld,\"waits\":%ld,\"system_calls\":%lu,\"faults\":%ld}",
               comma, op_names[note->op], cause_names[note->cause], note->size,
               (double)note->took * ns_per_tick / 1e3, (double)note->off_ns / 1e3,
               note->preemptions, note->waits, note->calls, note->faults);
        comma = ",";
    }
}

int main(int argc, char **argv) {
    begin(argc, argv);
    seconds_to_run = load_settle;
    // Threads' memory is mapped here, because it must not come from the allocator, and must not
    // cause page faults in batches.
    size_t size = sizeof *threads * (size_t)load_threads;
    threads = (struct thread *)mmap(NULL, size, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (threads == MAP_FAILED) die("no memory for the threads");
    // More than eight threads hold as many blocks as eight do, so that they fit into memory.
    if (load_threads > 8) high = (size_t)(HIGH * 8 / load_threads);
    if (high < 2 * LOW) high = 2 * LOW;
    calibrate();
    run_threads(load_threads, work);
    printf("{\"ns_per_tick\":%.6f,\"counts_system_calls\":%s,\"ops\":{", ns_per_tick,
           threads[0].counter >= 0 ? "true" : "false");
    for (int op = 0; op < OPS; op++) print_op((enum op)op);
    printf("},\"longest\":[");
    print_notes();
    printf("]}\n");
    fflush(stdout);
    _exit(0);
}

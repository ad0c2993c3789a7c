// Counts the transfers of cache lines between the CPUs of an emulated machine, and what causes
// them. vm/README.md ("What does not scale") says how.
//
// Threads: each emulated CPU has a thread of qemu's, which calls the functions below. A CPU's
// `struct cpu` belongs to its thread. A line's record has a lock, and so has the table of sites.
#define _GNU_SOURCE
#include "plugin.h"
#include "../../bench/loads/many.h"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

EXPORTED int qemu_plugin_version = 1;

enum { CPUS = 256, FUNCTIONS = 64, DEPTH = 64, SITES = 1 << 16 };
// The most CPUs that take turns in order, and the longest wait for a turn, in microseconds.
enum { ORDERED = 16, PATIENCE = 2000 };
// Guest memory that is watched. Higher addresses count as never transferred.
#define LINES (((uint64_t)16 << 30) / 64)

// What an operation is. PROGRAM is what user code does outside the allocator's functions.
enum kind { ALLOC, FREE, PROGRAM, KINDS };
static const char *const KIND_NAMES[KINDS] = {"alloc", "free", "program"};

struct counts {
    uint64_t operations, instructions;
    // Accesses to a line that another CPU changed; writes to a line that others hold as well.
    uint64_t misses, upgrades;
    // Locked instructions, and those on a line that another CPU wrote last.
    uint64_t locked, handovers;
    uint64_t fences, syscalls;
    // Transfers that the kernel caused meanwhile.
    uint64_t kernel;
    // Transfers by the program's first write to an object.
    uint64_t touches;
};

struct cpu {
    struct counts counts[KINDS];
    enum kind inside; // the kind of the function that runs, else PROGRAM
    uint64_t base;    // the address of the return address of that function
    // The calls that have not returned, outermost first: where the return address is, and the
    // call's own address.
    struct {
        uint64_t stack, code;
    } calls[DEPTH];
    unsigned depth;
    unsigned turn; // the window of counting in which the above was used
} __attribute__((aligned(128)));

// A line of physical memory, in a model of caches without limits.
struct line {
    uint64_t holders[CPUS / 64];
    uint16_t only;   // 1 + the CPU that changed the line and alone holds it, else 0
    uint16_t writer; // 1 + the CPU that wrote last, or 0
    uint8_t lock;
};

// An instruction, or a block, of which only the first two members count.
struct place {
    uint64_t address;
    uint32_t instructions;
    uint8_t function; // 1 + the kind, if this begins a function of the allocator
    bool is_kernel, is_locked, is_call, is_return, is_touch;
    uint8_t value; // the code of a value
    struct place *next;
};

struct site {
    uint64_t code, line;
    uint32_t misses, upgrades, handovers, syscalls;
    uint8_t kind;
};

static struct cpu cpus[CPUS];
static unsigned cpu_count;
static struct line *lines;
static enum { OFF, WATCH, COUNT } state;
static unsigned turn;
static FILE *out;

// How many operations each CPU has begun. CPUs that do not work have IDLE.
static const uint32_t IDLE = UINT32_MAX;
static uint32_t clocks[CPUS];

static struct {
    uint64_t address;
    enum kind kind;
} functions[FUNCTIONS];
static unsigned function_count;
static struct place *blocks;
static pthread_mutex_t places_lock = PTHREAD_MUTEX_INITIALIZER;

static struct site sites[SITES];
static unsigned lost_sites;
static pthread_mutex_t sites_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t zero, number, bases[3];

#define load(x) __atomic_load_n(&(x), __ATOMIC_RELAXED)
#define store(x, value) __atomic_store_n(&(x), value, __ATOMIC_RELAXED)

static void lock_line(struct line *line) {
    while (__atomic_exchange_n(&line->lock, 1, __ATOMIC_ACQUIRE)) sched_yield();
}

enum outcome { HIT, MISS, UPGRADE };

// Notes an access. `*foreign` says whether another CPU wrote the line last.
static enum outcome access_line(struct line *line, unsigned cpu, bool is_store, bool *foreign) {
    *foreign = false;
    if (load(line->only) == cpu + 1) return HIT;
    uint64_t bit = (uint64_t)1 << cpu % 64, *word = &line->holders[cpu / 64];
    if (!is_store && load(*word) & bit && !load(line->only)) return HIT;
    lock_line(line);
    bool held = *word & bit, others = false;
    *word &= ~bit;
    for (unsigned i = 0; i < CPUS / 64; i++) others |= line->holders[i] != 0;
    *foreign = line->writer && line->writer != cpu + 1;
    enum outcome outcome = HIT;
    if (is_store) {
        if (others) outcome = held ? UPGRADE : MISS;
        if (others) memset(line->holders, 0, sizeof line->holders);
        store(line->writer, (uint16_t)(cpu + 1));
        store(line->only, (uint16_t)(cpu + 1));
    } else {
        if (!held && *foreign) outcome = MISS;
        store(line->only, 0);
    }
    store(*word, *word | bit);
    __atomic_store_n(&line->lock, 0, __ATOMIC_RELEASE);
    return outcome;
}

enum event { IS_MISS = 1, IS_UPGRADE = 2, IS_HANDOVER = 4, IS_SYSCALL = 8 };

static void note_site(uint64_t code, uint64_t address, enum kind kind, int events) {
    uint64_t line = address & ~(uint64_t)63;
    uint64_t hash = (code * 31 + line) * 0x9e3779b97f4a7c15u + kind;
    pthread_mutex_lock(&sites_lock);
    for (unsigned i = 0; i < 64; i++) {
        struct site *site = &sites[((hash >> 40) + i) % SITES];
        if (!site->code) *site = (struct site){.code = code, .line = line, .kind = kind};
        if (site->code != code || site->line != line || site->kind != kind) continue;
        site->misses += !!(events & IS_MISS);
        site->upgrades += !!(events & IS_UPGRADE);
        site->handovers += !!(events & IS_HANDOVER);
        site->syscalls += !!(events & IS_SYSCALL);
        pthread_mutex_unlock(&sites_lock);
        return;
    }
    lost_sites++;
    pthread_mutex_unlock(&sites_lock);
}

// Follows calls and returns, so that a return from the function that was entered is recognised.
static void follow_stack(struct cpu *cpu, const struct place *place, bool is_store,
                         uint64_t address) {
    if (place->is_call && is_store) {
        if (cpu->depth == DEPTH)
            memmove(cpu->calls, cpu->calls + 1, --cpu->depth * sizeof *cpu->calls);
        cpu->calls[cpu->depth].stack = address;
        cpu->calls[cpu->depth++].code = place->address;
    } else if (place->is_return && !is_store) {
        while (cpu->depth && cpu->calls[cpu->depth - 1].stack <= address) cpu->depth--;
        if (cpu->inside != PROGRAM && address == cpu->base) cpu->inside = PROGRAM;
    }
}

static void on_access(unsigned index, MemInfo info, uint64_t address, void *data) {
    if (load(state) == OFF) return;
    const struct place *place = data;
    struct cpu *cpu = &cpus[index];
    bool is_store = qemu_plugin_mem_is_store(info), foreign = false;
    bool counts = load(state) == COUNT;
    enum outcome outcome = HIT;
    struct qemu_plugin_hwaddr *physical = qemu_plugin_get_hwaddr(info, address);
    if (physical && !qemu_plugin_hwaddr_is_io(physical)) {
        uint64_t line = qemu_plugin_hwaddr_phys_addr(physical) / 64;
        if (line < LINES) outcome = access_line(&lines[line], index, is_store, &foreign);
    }
    // An interrupt of user code stores to the kernel's stack.
    if (!counts || (!place->is_kernel && address >> 47)) return;
    struct counts *count = &cpu->counts[cpu->inside];
    if (place->is_kernel) {
        count->kernel += outcome != HIT;
        return;
    }
    bool handover = place->is_locked && is_store && foreign;
    count->locked += place->is_locked && is_store;
    count->handovers += handover;
    if (place->is_touch) {
        cpu->counts[PROGRAM].touches += outcome != HIT;
    } else {
        count->misses += outcome == MISS;
        count->upgrades += outcome == UPGRADE;
    }
    if (outcome != HIT && cpu->inside != PROGRAM)
        note_site(place->address, address, cpu->inside,
                  (outcome == MISS ? IS_MISS : IS_UPGRADE) | (handover ? IS_HANDOVER : 0));
    if (place->is_call || place->is_return) follow_stack(cpu, place, is_store, address);
}

static uint32_t slowest(void) {
    uint32_t least = IDLE;
    for (unsigned i = 0; i < cpu_count; i++) {
        uint32_t clock = load(clocks[i]);
        least = clock < least ? clock : least;
    }
    return least;
}

static void join_work(unsigned index) {
    uint32_t now = slowest();
    if (load(clocks[index]) == IDLE) store(clocks[index], now == IDLE ? 0 : now);
}

static int64_t microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

// Returns whether another CPU comes before this one, which has begun `clock` operations. Few CPUs
// take turns in the order of their numbers. Many CPUs would wait too long for each other, and go on
// in any order.
static bool is_another_first(unsigned index, uint32_t clock) {
    bool is_ordered = cpu_count <= ORDERED;
    for (unsigned i = 0; i < cpu_count; i++) {
        uint32_t other = load(clocks[i]);
        if (other < clock || (is_ordered && other == clock && i < index)) return true;
    }
    return false;
}

// Begins an operation. Lets other CPUs catch up first, so that operations of all CPUs alternate as
// on a machine that runs all CPUs at the same time. Gives up after some time, because the other CPU
// may wait until this one takes an interrupt.
static void take_turn(unsigned index) {
    join_work(index);
    uint32_t clock = load(clocks[index]);
    int64_t start = microseconds();
    while (is_another_first(index, clock) && microseconds() - start < PATIENCE) sched_yield();
    store(clocks[index], clock + 1);
}

static void on_block(unsigned index, void *data) {
    if (load(state) != COUNT) return;
    const struct place *block = data;
    struct cpu *cpu = &cpus[index];
    if (cpu->turn != load(turn)) {
        cpu->turn = load(turn);
        cpu->inside = PROGRAM;
        cpu->depth = 0;
    }
    if (load(block->function) && cpu->inside == PROGRAM && cpu->depth) {
        take_turn(index);
        cpu->inside = block->function - 1;
        cpu->base = cpu->calls[cpu->depth - 1].stack;
        cpu->counts[cpu->inside].operations++;
    }
    cpu->counts[cpu->inside].instructions += block->instructions;
}

static void on_pause(unsigned index, void *data) {
    (void)index, (void)data;
    sched_yield();
}

static void on_fence(unsigned index, void *data) {
    (void)data;
    if (load(state) == COUNT) cpus[index].counts[cpus[index].inside].fences++;
}

static void on_syscall(unsigned index, void *data) {
    (void)data;
    struct cpu *cpu = &cpus[index];
    if (load(state) != COUNT) return;
    cpu->counts[cpu->inside].syscalls++;
    // The allocator may call the kernel through the C library, so its own last call says more than
    // the address of this instruction.
    if (cpu->inside != PROGRAM && cpu->depth)
        note_site(cpu->calls[cpu->depth - 1].code, 0, cpu->inside, IS_SYSCALL);
}

static void on_idle(Id id, unsigned index) {
    (void)id;
    store(clocks[index], IDLE);
}

static int by_count(const void *a, const void *b) {
    const struct site *one = a, *other = b;
    uint64_t left = (uint64_t)one->misses + one->upgrades + one->syscalls;
    uint64_t right = (uint64_t)other->misses + other->upgrades + other->syscalls;
    if (left != right) return (left < right) - (left > right);
    return (one->code < other->code) - (one->code > other->code);
}

static void report(void) {
    fprintf(out, "{\"number\":%lu,\"allocator\":%lu,\"libc\":%lu,\"program\":%lu", number, bases[0],
            bases[1], bases[2]);
    for (int kind = 0; kind < KINDS; kind++) {
        struct counts sum = {0};
        for (unsigned i = 0; i < cpu_count; i++)
            for (size_t at = 0; at < sizeof sum / 8; at++)
                ((uint64_t *)&sum)[at] += ((uint64_t *)&cpus[i].counts[kind])[at];
        fprintf(out,
                ",\"%s\":{\"operations\":%lu,\"instructions\":%lu,\"misses\":%lu,\"upgrades\":%lu,"
                "\"locked\":%lu,\"handovers\":%lu,\"fences\":%lu,\"syscalls\":%lu,\"kernel\":%lu,"
                "\"touches\":%lu}",
                KIND_NAMES[kind], sum.operations, sum.instructions, sum.misses, sum.upgrades,
                sum.locked, sum.handovers, sum.fences, sum.syscalls, sum.kernel, sum.touches);
    }
    qsort(sites, SITES, sizeof *sites, by_count);
    fprintf(out, ",\"lost_sites\":%u,\"sites\":[", lost_sites);
    for (unsigned i = 0; i < SITES && sites[i].code; i++)
        fprintf(out, "%s[%lu,%lu,\"%s\",%u,%u,%u,%u]", i ? "," : "", sites[i].code,
                sites[i].line, KIND_NAMES[sites[i].kind], sites[i].misses, sites[i].upgrades,
                sites[i].handovers, sites[i].syscalls);
    fprintf(out, "]}\n");
    fflush(out);
    memset(sites, 0, sizeof sites);
    memset(cpus, 0, sizeof cpus);
    lost_sites = 0;
}

static void on_mark(unsigned index, void *data) {
    switch ((enum many_mark)(uintptr_t)data) {
    case MANY_CLEAR:
        store(state, OFF);
        madvise(lines, LINES * sizeof *lines, MADV_DONTNEED);
        store(state, WATCH);
        break;
    case MANY_COUNT:
        store(turn, turn + 1);
        store(state, COUNT);
        break;
    case MANY_STOP:
        if (load(state) == COUNT) store(state, WATCH);
        break;
    case MANY_REPORT:
        store(state, OFF);
        report();
        break;
    case MANY_WAIT:
        store(clocks[index], IDLE);
        sched_yield();
        break;
    case MANY_WAIT_TO_WORK:
        join_work(index);
        sched_yield();
        break;
    default:
        break;
    }
}

static uint8_t function_at(uint64_t address) {
    for (unsigned i = 0; i < function_count; i++)
        if (functions[i].address == address) return (uint8_t)(1 + functions[i].kind);
    return 0;
}

static void on_value(unsigned index, MemInfo info, uint64_t address, void *data) {
    (void)index, (void)info;
    const struct place *place = data;
    pthread_mutex_lock(&places_lock);
    switch ((enum many_mark)place->value) {
    case MANY_ALLOC:
    case MANY_FREE:
        if (function_count < FUNCTIONS && !function_at(address)) {
            functions[function_count].address = address;
            functions[function_count++].kind = place->value == MANY_ALLOC ? ALLOC : FREE;
        }
        break;
    case MANY_FORGET:
        function_count = 0;
        break;
    case MANY_ZERO:
        zero = address;
        break;
    case MANY_NUMBER:
        number = address - zero;
        break;
    default:
        bases[place->value - MANY_ALLOCATOR] = address;
        break;
    }
    for (struct place *block = blocks; block; block = block->next)
        store(block->function, function_at(block->address));
    pthread_mutex_unlock(&places_lock);
}

static struct place *new_place(uint64_t address) {
    struct place *place = calloc(1, sizeof *place);
    if (!place) abort();
    place->address = address;
    place->is_kernel = address >> 47;
    return place;
}

// Reads an instruction's bytes, as far as they matter here.
static void translate(struct qemu_plugin_insn *insn) {
    const uint8_t *bytes = qemu_plugin_insn_data(insn);
    size_t size = qemu_plugin_insn_size(insn);
    struct place *place = new_place(qemu_plugin_insn_vaddr(insn));
    uint32_t last = 0;
    if (size >= 6) memcpy(&last, bytes + size - 4, 4);
    bool is_nop = size >= 7 && bytes[0] == 0x0f && bytes[1] == 0x1f;
    if (!place->is_kernel && (last & ~0xffu) == MANY_MAGIC) {
        uint8_t code = last & 0xff;
        if (is_nop) {
            void *data = (void *)(uintptr_t)code;
            qemu_plugin_register_vcpu_insn_exec_cb(insn, on_mark, NO_REGISTERS, data);
            free(place);
            return;
        }
        place->is_touch = code == MANY_TOUCH;
        place->value = place->is_touch ? 0 : code;
    }
    size_t at = 0;
    bool has_f3 = false, has_lock = false;
    for (; at < size; at++) {
        uint8_t byte = bytes[at];
        has_lock |= byte == 0xf0;
        has_f3 |= byte == 0xf3;
        bool is_prefix = byte == 0xf0 || byte == 0xf2 || byte == 0xf3 || byte == 0x66 ||
                         byte == 0x67 || byte == 0x2e || byte == 0x3e || byte == 0x26 ||
                         byte == 0x36 || byte == 0x64 || byte == 0x65;
        if (!is_prefix && (byte & 0xf0) != 0x40) break;
    }
    uint8_t opcode = at < size ? bytes[at] : 0, second = at + 1 < size ? bytes[at + 1] : 0;
    uint8_t third = at + 2 < size ? bytes[at + 2] : 0;
    place->is_locked = has_lock || opcode == 0x86 || opcode == 0x87;
    place->is_call = opcode == 0xe8 || (opcode == 0xff && (second >> 3 & 7) == 2);
    place->is_return = opcode == 0xc3 || opcode == 0xc2;
    if (has_f3 && opcode == 0x90)
        qemu_plugin_register_vcpu_insn_exec_cb(insn, on_pause, NO_REGISTERS, NULL);
    if (!place->is_kernel && opcode == 0x0f && second == 0x05)
        qemu_plugin_register_vcpu_insn_exec_cb(insn, on_syscall, NO_REGISTERS, NULL);
    if (!place->is_kernel && opcode == 0x0f && second == 0xae && third == 0xf0)
        qemu_plugin_register_vcpu_insn_exec_cb(insn, on_fence, NO_REGISTERS, NULL);
    OnAccess access = place->value ? on_value : on_access;
    qemu_plugin_register_vcpu_mem_cb(insn, access, NO_REGISTERS, LOADS_AND_STORES, place);
}

static void on_translation(Id id, struct qemu_plugin_tb *tb) {
    (void)id;
    size_t count = qemu_plugin_tb_n_insns(tb);
    for (size_t i = 0; i < count; i++) translate(qemu_plugin_tb_get_insn(tb, i));
    uint64_t address = qemu_plugin_tb_vaddr(tb);
    if (address >> 47) return;
    struct place *block = new_place(address);
    block->instructions = (uint32_t)count;
    pthread_mutex_lock(&places_lock);
    block->function = function_at(address);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&places_lock);
    qemu_plugin_register_vcpu_tb_exec_cb(tb, on_block, NO_REGISTERS, block);
}

EXPORTED int qemu_plugin_install(Id id, const Info *info, int argc, char **argv) {
    cpu_count = (unsigned)info->machine.cpus;
    const char *path = argc == 1 && !strncmp(argv[0], "out=", 4) ? argv[0] + 4 : NULL;
    if (!path || !info->is_machine || strcmp(info->target, "x86_64") || cpu_count > CPUS) {
        fprintf(stderr, "many: needs out=FILE and an x86_64 machine of at most %d CPUs\n", CPUS);
        return 1;
    }
    out = fopen(path, "w");
    lines = mmap(NULL, LINES * sizeof *lines, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!out || lines == MAP_FAILED) {
        fprintf(stderr, "many: cannot write %s, or there is no memory\n", path);
        return 1;
    }
    memset(clocks, 0xff, sizeof clocks);
    qemu_plugin_register_vcpu_idle_cb(id, on_idle);
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    return 0;
}

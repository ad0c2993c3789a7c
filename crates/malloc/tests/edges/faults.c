/*
 * The system's memory calls fail, one at a time and in stretches, and no object is lost.
 *
 * Usage: faults [CASE [N]]    (no case: all; no N: every N until the script makes fewer calls)
 *
 * A child of this process runs a script of allocations. A filter traps mmap, munmap, mremap,
 * mprotect, madvise and membarrier. The handler of the trap counts the calls and makes those that
 * may succeed, from one instruction that the filter lets pass. It answers the others with an error.
 * The first call that counts is the first that the allocator makes, since nothing allocates before.
 */
#include "seccomp.h"
#include "pinfold.h"
#include <fcntl.h>
#include <malloc.h>
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>

#pragma weak pinfold_cache_create
#pragma weak pinfold_cache_destroy
#pragma weak pinfold_cache_alloc
#pragma weak pinfold_cache_zalloc
#pragma weak pinfold_cache_free
#pragma weak pinfold_cache_alloc_bulk
#pragma weak pinfold_cache_free_bulk
#pragma weak pinfold_cache_shrink
#pragma weak pinfold_cache_in_use
#pragma weak pinfold_cache_validate
#pragma weak pinfold_cache_prefill
#pragma weak pinfold_prefilled_alloc
#pragma weak pinfold_prefilled_len
#pragma weak pinfold_prefilled_refill
#pragma weak pinfold_prefilled_destroy
#pragma weak pinfold_mempool_create
#pragma weak pinfold_mempool_alloc
#pragma weak pinfold_mempool_available
#pragma weak pinfold_mempool_free
#pragma weak pinfold_mempool_destroy
#pragma weak pinfold_cache_free_deferred
#pragma weak pinfold_cache_flush_deferred
#pragma weak pinfold_grace_synchronize
#pragma weak pinfold_counter_create
#pragma weak pinfold_counter_destroy
#pragma weak pinfold_counter_add
#pragma weak pinfold_counter_read
#pragma weak pinfold_counter_sum

/* A fault: which calls fail, and how. */
struct fault {
	const char *name;
	/* How many calls fail in a row, from the n-th on. */
	long length;
	/* The errno of a failing call, and of a failing membarrier. */
	int error, fence_error;
	/* The only call that fails; 0 if every call does. */
	int only;
};

static const struct fault faults[] = {
	{ "one", 1, ENOMEM, ENOMEM, 0 },
	{ "stretch", 12, ENOMEM, ENOMEM, 0 },
	{ "rest", 1L << 40, ENOMEM, ENOMEM, 0 },
	{ "fences", 1L << 40, 0, EPERM, SYS_membarrier },
	{ "unmaps", 1L << 40, ENOMEM, 0, SYS_munmap },
	{ "sandbox", 12, ENOMEM, EPERM, 0 },
};

/* What the child reports, also if it crashes. */
struct record {
	volatile long calls, failed, fences_failed, refusals;
	volatile int number;
	volatile long arguments[3];
	volatile int line;
};

static struct record *record;
static const struct fault *fault;
static long first;
static volatile int injecting;

#define SCRIPT(x)                                                                                  \
	do {                                                                                       \
		record->line = __LINE__;                                                           \
		CHECK(x);                                                                          \
	} while (0)

/* Makes the call `number`. The filter knows the address behind its instruction. */
long pass(long number, long a, long b, long c, long d, long e, long f);
extern char passed[];
#if defined(__x86_64__)
__asm__(".text\n.globl pass\npass:\n"
	"mov %rdi, %rax\nmov %rsi, %rdi\nmov %rdx, %rsi\nmov %rcx, %rdx\n"
	"mov %r8, %r10\nmov %r9, %r8\nmov 8(%rsp), %r9\nsyscall\n"
	".globl passed\npassed:\nret\n");
#define REGISTERS(context) ((context)->uc_mcontext.gregs)
#define ARGUMENTS(r) (long)(r)[REG_RDI], (long)(r)[REG_RSI], (long)(r)[REG_RDX], \
		     (long)(r)[REG_R10], (long)(r)[REG_R8], (long)(r)[REG_R9]
#define RESULT REG_RAX
#elif defined(__aarch64__)
__asm__(".text\n.globl pass\npass:\n"
	"mov x8, x0\nmov x0, x1\nmov x1, x2\nmov x2, x3\n"
	"mov x3, x4\nmov x4, x5\nmov x5, x6\nsvc 0\n"
	".globl passed\npassed:\nret\n");
#define REGISTERS(context) ((context)->uc_mcontext.regs)
#define ARGUMENTS(r) (long)(r)[0], (long)(r)[1], (long)(r)[2], (long)(r)[3], (long)(r)[4], \
		     (long)(r)[5]
#define RESULT 0
#else
#error "the filter is for x86-64 and aarch64"
#endif

static long pass_all(int number, long a, long b, long c, long d, long e, long f)
{
	return pass(number, a, b, c, d, e, f);
}

static int fails(int number, long call)
{
	if (!injecting || call < first || call - first >= fault->length)
		return 0;
	return fault->only == 0 || fault->only == number;
}

static void note(int number, long a, long b, long c, long d, long e, long f)
{
	(void)d, (void)e, (void)f;
	record->number = number;
	record->arguments[0] = a;
	record->arguments[1] = b;
	record->arguments[2] = c;
}

static void on_call(int signal, siginfo_t *info, void *context)
{
	(void)signal;
	int before = errno, number = info->si_syscall;
	__auto_type registers = REGISTERS((ucontext_t *)context);
	long call = injecting ? __sync_add_and_fetch(&record->calls, 1) : 0;
	if (fails(number, call)) {
		if (record->failed++ == 0)
			note(number, ARGUMENTS(registers));
		record->fences_failed += number == SYS_membarrier;
		registers[RESULT] = -(number == SYS_membarrier ? fault->fence_error : fault->error);
	} else
		registers[RESULT] = pass_all(number, ARGUMENTS(registers));
	errno = before;
}

/* Traps the memory calls from everywhere but `pass`. */
static void trap_calls(void)
{
	static const int calls[] = { SYS_mmap,	  SYS_munmap,  SYS_mremap,
				     SYS_mprotect, SYS_madvise, SYS_membarrier };
	enum { CALLS = sizeof calls / sizeof *calls };
	struct sock_filter code[CALLS + 8];
	unsigned long behind = (unsigned long)passed;
	unsigned short n = 0;
	struct sigaction action = { .sa_sigaction = on_call, .sa_flags = SA_SIGINFO };
	CHECK(sigaction(SIGSYS, &action, NULL) == 0);
	size_t pointer = offsetof(struct seccomp_data, instruction_pointer);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
						 offsetof(struct seccomp_data, nr));
	for (int i = 0; i < CALLS; i++)
		code[n++] = (struct sock_filter)BPF_JUMP(
			BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], (unsigned char)(CALLS - i),
				0);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)pointer);
	code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)behind, 0, 3);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)pointer + 4);
	code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
						 (unsigned)(behind >> 32), 0, 1);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
	struct sock_fprog program = { n, code };
	CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		skip("this machine allows no seccomp filter");
}

/* The objects that the script holds now. */

enum { OBJECTS = 480, MARK = 4711 };

struct object {
	unsigned char *at;
	size_t size;
	unsigned char byte;
};

static struct object objects[OBJECTS];

/* An allocation may fail only after a fault, and then with ENOMEM. */
static void judge_refusal_at(int line, const void *block)
{
	if (block)
		return;
	if (errno != ENOMEM)
		FAIL("line %d: refused with errno %d (%s)", line, errno, strerror(errno));
	if (record->failed == 0 || !injecting)
		FAIL("line %d: refused without a fault", line);
	record->refusals++;
}

#define judge_refusal(block) judge_refusal_at(__LINE__, block)

static int all_bytes_are(const unsigned char *at, size_t size, unsigned char byte)
{
	return size == 0 || (at[0] == byte && memcmp(at, at + 1, size - 1) == 0);
}

static void mark(struct object *object)
{
	object->byte = (unsigned char)(1 + (object - objects + object->size) % 255);
	memset(object->at, object->byte, object->size);
}

static void verify(const struct object *object)
{
	if (object->at)
		SCRIPT(all_bytes_are(object->at, object->size, object->byte));
}

static void verify_all(void)
{
	for (int i = 0; i < OBJECTS; i++)
		verify(&objects[i]);
}

static size_t alignment_of(int nth, size_t size)
{
	static const size_t alignments[] = { 32, 256, 4096, 16384, 65536, 1 << 20, 4 << 20 };
	size_t count = size > 100000 ? 7 : 5;
	return alignments[(size_t)nth % count];
}

static void take(int nth, size_t size)
{
	struct object *object = &objects[nth];
	SCRIPT(object->at == NULL);
	errno = 0;
	switch (nth % 5) {
	case 1:
		object->at = calloc(1, size);
		SCRIPT(!object->at || all_bytes_are(object->at, size, 0));
		break;
	case 3: {
		size_t alignment = alignment_of(nth / 5, size);
		void *block = NULL;
		int error = posix_memalign(&block, alignment, size);
		SCRIPT(error == 0 || (error == ENOMEM && block == NULL));
		SCRIPT((size_t)block % alignment == 0);
		object->at = block;
		if (error)
			errno = error;
		break;
	}
	default:
		object->at = malloc(size);
	}
	judge_refusal(object->at);
	object->size = size;
	if (object->at) {
		SCRIPT(malloc_usable_size(object->at) >= size);
		mark(object);
	}
}

static void give(int nth)
{
	verify(&objects[nth]);
	errno = MARK;
	free(objects[nth].at);
	SCRIPT(errno == MARK);
	objects[nth].at = NULL;
}

static void resize(int nth, size_t size)
{
	struct object *object = &objects[nth];
	if (!object->at)
		return;
	errno = 0;
	unsigned char *moved = realloc(object->at, size);
	judge_refusal(moved);
	if (!moved) {
		verify(object);
		return;
	}
	object->at = moved;
	SCRIPT(all_bytes_are(moved, size < object->size ? size : object->size, object->byte));
	object->size = size;
	mark(object);
}

/* A size for each object: most are small, some are runs, a few have a mapping of their own. */
static size_t size_of(int nth)
{
	size_t n = (size_t)nth;
	if (nth % 120 == 7)
		return (2 << 20) + n * 1500;
	if (nth % 30 == 5)
		return 40000 + n * 700;
	if (nth % 6 == 2)
		return 1000 + n * 25;
	return 1 + n * 7 % 900;
}

/* Allocates what is not there. Returns how many objects are. */
static int fill(void)
{
	int there = 0;
	for (int i = 0; i < OBJECTS; i++) {
		if (!objects[i].at)
			take(i, size_of(i));
		there += objects[i].at != NULL;
	}
	return there;
}

/* Moves to the n-th of the CPUs that the process may use, so that caches of several are in use. */
static void move(int nth)
{
	static cpu_set_t all;
	if (CPU_COUNT(&all) == 0)
		SCRIPT(sched_getaffinity(0, sizeof all, &all) == 0);
	nth %= CPU_COUNT(&all);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &all) && nth-- == 0) {
			cpu_set_t one;
			CPU_ZERO(&one);
			CPU_SET(cpu, &one);
			(void)sched_setaffinity(0, sizeof one, &one);
			return;
		}
}

static void blocks(void)
{
	move(0);
	(void)fill();
	verify_all();
	for (int i = 0; i < OBJECTS; i += 2)
		give(i);
	move(1);
	for (int i = 1; i < OBJECTS; i += 6)
		resize(i, objects[i].size * 3 + 10);
	for (int i = 1; i < OBJECTS; i += 12)
		resize(i, objects[i].size / 5 + 1);
	for (int i = 7; i < OBJECTS; i += 120) {
		resize(i, 4 << 20);
		resize(i, 3 << 20);
		resize(i, 50000);
	}
	(void)malloc_trim(0);
	verify_all();
	(void)fill();
	verify_all();
	for (int i = 0; i < OBJECTS; i++)
		if (i % 3)
			give(i);
	move(0);
	(void)malloc_trim(0);
	verify_all();
}

/* A second thread frees and allocates. It has a stack already, so that only malloc makes calls. */
static void *use_in_thread(void *argument)
{
	move(1);
	for (int i = 0; i < OBJECTS; i += 4)
		give(i);
	for (int i = 0; i < OBJECTS; i += 8)
		take(i, size_of(i));
	return argument;
}

static void beside_a_thread(void)
{
	static char stack[256 << 10] __attribute__((aligned(4096)));
	pthread_attr_t attributes;
	pthread_t thread;
	pthread_attr_init(&attributes);
	pthread_attr_setstack(&attributes, stack, sizeof stack);
	int error = pthread_create(&thread, &attributes, use_in_thread, NULL);
	pthread_attr_destroy(&attributes);
	/* The C library allocates for a thread. */
	SCRIPT(error == 0 || ((error == EAGAIN || error == ENOMEM) && record->failed));
	if (error == 0)
		pthread_join(thread, NULL);
	(void)malloc_trim(0);
	verify_all();
}

/* Object caches, prefilled sheaves, memory pools, deferred frees and counters. */

enum { CACHED = 300 };

static void construct(void *object)
{
	memset(object, 0x77, 48);
}

static void use_cache(const char *name, size_t size, unsigned flags, void (*constructor)(void *))
{
	void *held[CACHED] = { 0 };
	size_t there = 0;
	errno = 0;
	struct pinfold_cache *cache = pinfold_cache_create(name, size, 0, flags, constructor);
	judge_refusal(cache);
	if (!cache)
		return;
	for (size_t i = 0; i < CACHED / 2; i++) {
		errno = 0;
		void *object = i % 8 == 0 && !constructor ? pinfold_cache_zalloc(cache)
							  : pinfold_cache_alloc(cache);
		judge_refusal(object);
		if (!object)
			continue;
		if (constructor)
			SCRIPT(all_bytes_are(object, 48, 0x77));
		else if (i % 8 == 0)
			SCRIPT(all_bytes_are(object, size, 0));
		held[there++] = object;
	}
	errno = 0;
	size_t more = pinfold_cache_alloc_bulk(cache, CACHED - there, held + there);
	SCRIPT(more <= CACHED - there);
	judge_refusal(more == CACHED - there ? cache : NULL);
	there += more;
	for (size_t i = 0; i < there; i++)
		if (!constructor)
			memset(held[i], (int)i, size);

	errno = 0;
	struct pinfold_prefilled *sheaf = pinfold_cache_prefill(cache, 40);
	judge_refusal(sheaf);
	if (sheaf) {
		SCRIPT(pinfold_prefilled_len(sheaf) == 40);
		for (int i = 0; i < 30; i++) {
			void *object = pinfold_prefilled_alloc(sheaf);
			SCRIPT(object);
			pinfold_cache_free(cache, object);
		}
		errno = 0;
		int error = pinfold_prefilled_refill(sheaf, 60);
		judge_refusal(error ? NULL : sheaf);
		SCRIPT(pinfold_prefilled_len(sheaf) >= (error ? 10 : 60));
	}
	errno = 0;
	struct pinfold_mempool *pool = pinfold_mempool_create(cache, 20);
	judge_refusal(pool);
	if (pool) {
		void *reserved[20];
		SCRIPT(pinfold_mempool_available(pool) == 20);
		for (int i = 0; i < 20; i++)
			SCRIPT((reserved[i] = pinfold_mempool_alloc(pool)) != NULL);
		for (int i = 0; i < 20; i++) {
			if (constructor)
				SCRIPT(all_bytes_are(reserved[i], 48, 0x77));
			pinfold_mempool_free(pool, reserved[i]);
		}
		SCRIPT(pinfold_mempool_available(pool) == 20);
		pinfold_mempool_destroy(pool);
	}

	/* A third of the objects is freed one at a time, a third together, and a third deferred. */
	size_t third = there / 3;
	for (size_t i = 0; i < there; i++) {
		if (!constructor)
			SCRIPT(all_bytes_are(held[i], size, (unsigned char)i));
		errno = MARK;
		if (i < third)
			pinfold_cache_free(cache, held[i]);
		else if (i < 2 * third)
			pinfold_cache_free_deferred(cache, held[i]);
		SCRIPT(errno == MARK);
	}
	(void)pinfold_grace_synchronize();
	(void)pinfold_cache_flush_deferred(cache);
	errno = MARK;
	pinfold_cache_free_bulk(cache, there - 2 * third, held + 2 * third);
	SCRIPT(errno == MARK);
	SCRIPT(pinfold_cache_validate(cache, NULL, NULL) == 0);
	(void)pinfold_cache_shrink(cache);
	pinfold_prefilled_destroy(sheaf);

	errno = 0;
	if (pinfold_cache_destroy(cache) == -1) {
		SCRIPT(record->fences_failed);
		SCRIPT(errno == ENOTSUP || errno == EBUSY);
		/* The cache is as before, and serves. */
		void *object = pinfold_cache_alloc(cache);
		pinfold_cache_free(cache, object);
		/* A fence that a sandbox refused is not asked for again. */
		if (fault->fence_error == EPERM)
			return;
		SCRIPT(injecting);
		int was = injecting;
		injecting = 0;
		SCRIPT(pinfold_grace_synchronize() == 0);
		SCRIPT(pinfold_cache_flush_deferred(cache) == 0);
		SCRIPT(pinfold_cache_shrink(cache) >= 0);
		SCRIPT(pinfold_cache_in_use(cache) == 0);
		SCRIPT(pinfold_cache_destroy(cache) == 0);
		injecting = was;
	}
}

static void use_counter(void)
{
	errno = 0;
	struct pinfold_counter *counter = pinfold_counter_create(5, 32);
	judge_refusal(counter);
	if (!counter)
		return;
	for (int i = 0; i < 1000; i++) {
		if (i % 100 == 0)
			move(i / 100);
		pinfold_counter_add(counter, i % 7 == 0 ? 100 : 1);
	}
	(void)pinfold_counter_read(counter);
	SCRIPT(pinfold_counter_sum(counter) == 5 + 143 * 100 + 857);
	pinfold_counter_destroy(counter);
}

static void caches_and_counters(void)
{
	if (!pinfold_cache_create)
		return;
	move(0);
	use_cache("plain", 72, 0, NULL);
	use_cache("hardened", 200, PINFOLD_SLAB_HARDENED, NULL);
	use_cache("constructed", 48, 0, construct);
	use_cache("checked", 90, PINFOLD_SLAB_RED_ZONE | PINFOLD_SLAB_POISON, NULL);
	use_cache("large", 9000, PINFOLD_SLAB_HWCACHE_ALIGN, NULL);
	use_counter();
}

/* Returns the bytes of the process that are in memory. */
static long resident(void)
{
	char text[100] = "";
	int file = open("/proc/self/statm", O_RDONLY);
	SCRIPT(file >= 0);
	SCRIPT(read(file, text, sizeof text - 1) > 0);
	close(file);
	return atol(strchr(text, ' ')) * sysconf(_SC_PAGESIZE);
}

/* After the fault everything can be had that could be had before it. */
static void script(void)
{
	move(0);
	injecting = 1;
	blocks();
	caches_and_counters();
	beside_a_thread();
	blocks();
	injecting = 0;
	verify_all();
	SCRIPT(fill() == OBJECTS);
	blocks();
	caches_and_counters();
	beside_a_thread();
	SCRIPT(fill() == OBJECTS);
	for (int i = 0; i < OBJECTS; i++)
		give(i);
	(void)malloc_trim(0);
	/* Blocks of 10 MB whose mapping the kernel keeps do not keep their memory. */
	long before = resident();
	injecting = 1;
	for (int i = 0; fault->only == SYS_munmap && i < 10; i++) {
		volatile char *block = malloc(10 << 20);
		judge_refusal((void *)block);
		for (long at = 0; block && at < 10 << 20; at += 4096)
			block[at] = 1;
		free((void *)block);
	}
	injecting = 0;
	if (resident() - before > 40 << 20)
		FAIL("%ld MiB are resident after the end, %ld before", resident() >> 20,
		     before >> 20);
}

static const char *name_of(int number)
{
	switch (number) {
	case SYS_mmap: return "mmap";
	case SYS_munmap: return "munmap";
	case SYS_mremap: return "mremap";
	case SYS_mprotect: return "mprotect";
	case SYS_madvise: return "madvise";
	case SYS_membarrier: return "membarrier";
	default: return "none";
	}
}

/* Runs the script with the n-th call failing. Returns whether it went well. */
static int run(long n)
{
	char text[250], end[60];
	memset(record, 0, sizeof *record);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		first = n;
		alarm(60);
		trap_calls();
		script();
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child);
	if (status == 0)
		return 1;
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		_exit(77);
	if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
		snprintf(end, sizeof end, "stuck");
	else if (WIFSIGNALED(status))
		snprintf(end, sizeof end, "signal %d", WTERMSIG(status));
	else
		snprintf(end, sizeof end, "status %d", WEXITSTATUS(status));
	snprintf(text, sizeof text, "%s %ld: %s, near line %d; first %s(%#lx, %#lx, %#lx) failed",
		 fault->name, n, end, record->line, name_of(record->number), record->arguments[0],
		 record->arguments[1], record->arguments[2]);
	say(text);
	return 0;
}

int main(int count, char **words)
{
	int bad = 0;
	record = mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	CHECK(record != MAP_FAILED);
	for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
		char text[200];
		long n = 1, calls = 0, failed = 0, refusals = 0, runs = 0;
		fault = &faults[i];
		if (count > 1 && strcmp(words[1], fault->name))
			continue;
		if (count > 2) {
			bad += !run(atol(words[2]));
			snprintf(text, sizeof text, "%s: %ld calls, %ld failed, %ld refusals",
				 fault->name, record->calls, record->failed, record->refusals);
			say(text);
			continue;
		}
		/*
		 * A fault for the rest of the script is about the same from one call to the next.
		 */
		long step = fault->length > 1000 ? 8 : getenv("EDGE_CONTROL") ? 5 : 100000;
		for (;; n += 1 + n / step) {
			bad += !run(n);
			runs++;
			calls = record->calls;
			failed += record->failed;
			refusals += record->refusals;
			if (bad > 20 || (record->failed == 0 && record->calls < n))
				break;
		}
		snprintf(text, sizeof text,
			 "%s: %ld runs of %ld calls, %ld calls failed, %ld allocations refused",
			 fault->name, runs, calls, failed, refusals);
		say(text);
	}
	return bad ? 1 : 0;
}

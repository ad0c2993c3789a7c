/*
 * Faults of a program that does not know Pinfold are found by the variables that its user sets, as
 * the kernel's slub_kunit expects of kmalloc.
 *
 * Each fault is planted in another process of this program. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEBUG "PINFOLD_SLAB_DEBUG=FZPU,kmalloc-*"
#define HARDENED "PINFOLD_HARDENED=1"

/* Hides a block from the compiler's analysis. */
static void *hide(void *block)
{
	__asm__ volatile("" : "+r"(block));
	return block;
}

/* The report must name this function as the allocating one. */
__attribute__((noinline)) static void *session_new(size_t size)
{
	void *session = hide(malloc(size));

	CHECK(session);
	return session;
}

static void churn(size_t size)
{
	for (int n = 0; n < 200000; n++)
		free(hide(malloc(size)));
}

static void redzone_alloc(void)
{
	volatile unsigned char *block = session_new(18);

	block[18] = 0xab;
	block[19] = 0xab;
	free((void *)block);
}

static void left_redzone(void)
{
	volatile unsigned char *block = session_new(64);

	block[-1] = 0x12;
	free((void *)block);
}

static void double_free(void)
{
	char *block = session_new(100), *stale = hide(block);

	free(block);
	free(stale);
}

static void use_after_free(void)
{
	unsigned char *block = session_new(100);
	volatile unsigned char *stale = hide(block);

	free(block);
	stale[7] = 0x12;
	churn(100);
}

static void inside(void)
{
	char *block = session_new(100);

	free(hide(block + 16));
}

static void realloc_freed(void)
{
	char *block = session_new(100), *stale = hide(block);

	free(block);
	hide(realloc(stale, 100));
}

static void realloc_inside(void)
{
	char *block = session_new(300000);

	hide(realloc(hide(block + 16), 300000));
}

static void size_of_freed(void)
{
	char *block = session_new(3000), *stale = hide(block);

	free(block);
	exit(malloc_usable_size(stale) > 0);
}

/* The weak declarations find no function in a program on another allocator. */
extern void free_sized(void *block, size_t size) __attribute__((weak));
extern void free_aligned_sized(void *block, size_t align, size_t size) __attribute__((weak));

static void freed_as_larger(void)
{
	free_sized(session_new(100), 300);
}

static void freed_as_smaller(void)
{
	free_aligned_sized(hide(aligned_alloc(64, 4096)), 64, 100);
}

/* Every size that a good program may pass is accepted. */
static void sizes_fine(void)
{
	for (size_t size = 0; size < 700000; size += size / 7 + 1) {
		void *block = hide(malloc(size));
		size_t usable = malloc_usable_size(block);

		memset(block, 1, usable);
		free_sized(block, usable);
		free_sized(hide(malloc(size)), size);
		free_sized(hide(calloc(1, size)), size);
		free_sized(hide(realloc(hide(malloc(2 * size + 32)), size + 16)), size + 16);
		free_sized(hide(realloc(hide(malloc(size + 1)), size + 900)), size + 900);
		for (size_t align = 16; align <= 65536; align *= 4) {
			free_aligned_sized(hide(aligned_alloc(align, size)), align, size);
			block = hide(memalign(align, size));
			free(hide(realloc(block, malloc_usable_size(block) / 2 + 1)));
		}
	}
	free_sized(NULL, 5);
	puts("fine");
}

static int filled(const unsigned char *block, size_t size)
{
	for (size_t n = 0; n < size; n++)
		if (block[n] != (unsigned char)(n * 7))
			return 0;
	return 1;
}

static unsigned char *resized(unsigned char *block, size_t from, size_t to)
{
	block = hide(realloc(block, to));
	CHECK(block && malloc_usable_size(block) == to);
	CHECK(filled(block, from < to ? from : to));
	for (size_t n = 0; n < to; n++)
		block[n] = (unsigned char)(n * 7);
	return block;
}

/*
 * Like the kernel's test_krealloc_redzone_zeroing: sizes change, contents stay, and a byte that a
 * realloc took from the red zone is no fault.
 */
static void realloc_fine(void)
{
	unsigned char *block = hide(malloc(48)), *first;

	for (size_t n = 0; n < 48; n++)
		block[n] = (unsigned char)(n * 7);
	first = block;
	block = resized(block, 48, 40);
	CHECK(block == first);
	block = resized(block, 40, 56);
	block = resized(block, 56, 112);
	CHECK(block != first);
	free(block);

	/* The block stays while the class of its first size has room. */
	block = hide(malloc(180));
	for (size_t n = 0; n < 180; n++)
		block[n] = (unsigned char)(n * 7);
	first = block;
	block = resized(block, 180, 170);
	CHECK(block == first);
	block = resized(block, 170, 190);
	CHECK(block == first);
	block = resized(block, 190, 400);
	CHECK(block != first);
	free(block);
	puts("fine");
}

/* The red zone moves with the size: byte 44 lies behind the new size. */
static void realloc_shrunk(void)
{
	volatile unsigned char *block = hide(realloc(session_new(48), 40));

	block[44] = 0xab;
	free((void *)block);
}

static void realloc_grown(void)
{
	volatile unsigned char *block = hide(realloc(session_new(170), 185));

	block[185] = 0xab;
	free((void *)block);
}

static void no_fault(void)
{
	for (size_t size = 1; size < 100000; size = size * 5 / 4 + 1) {
		unsigned char *block = hide(malloc(size));

		memset(block, 1, size);
		block = hide(realloc(block, size + size / 8));
		memset(block, 1, size + size / 8);
		free(block);
		block = hide(calloc(size, 1));
		for (size_t n = 0; n < size; n++)
			CHECK(block[n] == 0);
		memset(block, 1, size);
		free(block);
		CHECK(posix_memalign((void **)&block, 64, size) == 0 && (uintptr_t)block % 64 == 0);
		memset(block, 1, size);
		free(block);
	}
	puts("fine");
}

static const struct {
	const char *name;
	void (*plant)(void);
	const char *setting;
	/*
	 * Texts that standard error must contain. Without any, the program must succeed and say
	 * "fine".
	 */
	const char *said[6];
} faults[] = {
	{ "redzone_alloc", redzone_alloc, DEBUG,
	  { "cache kmalloc-00032: right red zone overwritten",
	    "at offset 18: 0xab instead of 0xcc, 2 wrong in all", "allocated by thread",
	    " session_new ", " main " } },
	{ "left_redzone", left_redzone, DEBUG,
	  { "cache kmalloc-00064: left red zone overwritten",
	    "at offset -1: 0x12 instead of 0xcc, 1 wrong in all", " main " } },
	{ "double_free", double_free, DEBUG,
	  { "cache kmalloc-00112: object freed twice", "allocated by thread", " session_new ",
	    "freed by thread", " double_free ", " main " } },
	{ "use_after_free", use_after_free, DEBUG,
	  { "cache kmalloc-00112: poison overwritten: written to after it was freed",
	    "at offset 7: 0x12 instead of 0x6b, 1 wrong in all",
	    "freed by thread", " use_after_free ", " main " } },
	{ "inside", inside, DEBUG, { "cache kmalloc-00112: not the start of an object" } },
	{ "realloc_shrunk", realloc_shrunk, DEBUG,
	  { "cache kmalloc-00048: right red zone overwritten",
	    "at offset 44: 0xab instead of 0xcc, 1 wrong in all" } },
	{ "realloc_grown", realloc_grown, DEBUG,
	  { "cache kmalloc-00192: right red zone overwritten",
	    "at offset 185: 0xab instead of 0xcc, 1 wrong in all" } },
	{ "realloc_fine", realloc_fine, DEBUG, { NULL } },
	{ "no_fault", no_fault, DEBUG, { NULL } },
	{ "double_free", double_free, HARDENED, { "cache kmalloc-00112: object freed twice" } },
	{ "use_after_free", use_after_free, HARDENED,
	  { "cache kmalloc-00112: object written to after it was freed" } },
	{ "inside", inside, HARDENED, { "cache kmalloc-00112: not the start of an object" } },
	{ "no_fault", no_fault, HARDENED, { NULL } },
	{ "realloc_freed", realloc_freed, DEBUG, { "cache kmalloc-00112: object used after it was freed" } },
	{ "realloc_inside", realloc_inside, DEBUG, { "cache kmalloc-326656: not the start of an object" } },
	{ "size_of_freed", size_of_freed, DEBUG, { "object used after it was freed" } },
	{ "freed_as_larger", freed_as_larger, DEBUG,
	  { "cache kmalloc-00112: object freed with a size that is not its own", "a size of 300 bytes" } },
	{ "freed_as_smaller", freed_as_smaller, DEBUG,
	  { "cache kmalloc-04160: object freed with a size that is not its own" } },
	{ "sizes_fine", sizes_fine, DEBUG, { NULL } },
	{ "realloc_freed", realloc_freed, HARDENED, { "cache kmalloc-00112: object used after it was freed" } },
	{ "realloc_inside", realloc_inside, HARDENED, { "cache kmalloc-326656: not the start of an object" } },
	{ "size_of_freed", size_of_freed, HARDENED, { "object used after it was freed" } },
	{ "freed_as_larger", freed_as_larger, HARDENED,
	  { "cache kmalloc-00112: object freed with a size that is not its own", "a size of 300 bytes" } },
	{ "freed_as_smaller", freed_as_smaller, HARDENED,
	  { "cache kmalloc-04160: object freed with a size that is not its own" } },
	{ "sizes_fine", sizes_fine, HARDENED, { NULL } },
};
#define FAULTS (sizeof(faults) / sizeof(*faults))

/*
 * Runs this program again with a fault. Stores what it wrote to standard output and error, and
 * returns its status.
 */
static int started_again(const char *self, size_t nth, char *said, size_t room)
{
	int ends[2], status;
	size_t length = 0;
	pid_t child;
	ssize_t got;

	CHECK(pipe(ends) == 0);
	fflush(stdout);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		const struct rlimit none = { 0, 0 };
		char number[20];

		dup2(ends[1], 2);
		dup2(ends[1], 1);
		close(ends[0]);
		close(ends[1]);
		setrlimit(RLIMIT_CORE, &none);
		putenv((char *)faults[nth].setting);
		snprintf(number, sizeof(number), "%zu", nth);
		execl(self, self, number, (char *)NULL);
		_exit(127);
	}
	close(ends[1]);
	while ((got = read(ends[0], said + length, room - 1 - length)) > 0)
		length += (size_t)got;
	said[length] = '\0';
	close(ends[0]);
	CHECK(waitpid(child, &status, 0) == child);
	return status;
}

int main(int count, char **arguments)
{
	static char said[65536];

	if (count > 1) {
		faults[strtoul(arguments[1], NULL, 10)].plant();
		return 0;
	}
	for (size_t nth = 0; nth < FAULTS; nth++) {
		int status = started_again("/proc/self/exe", nth, said, sizeof(said));
		int aborts = faults[nth].said[0] != NULL;
		int right = aborts ? WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT
				   : status == 0 && strcmp(said, "fine\n") == 0;

		for (size_t n = 0; n < 6 && faults[nth].said[n]; n++)
			if (!strstr(said, faults[nth].said[n])) {
				printf("not said: %s\n", faults[nth].said[n]);
				right = 0;
			}
		if (!right) {
			printf("%s with %s ended with status %#x and said:\n%s", faults[nth].name,
			       faults[nth].setting, (unsigned)status,
			       said);
			return 1;
		}
	}
	puts("ok");
	return 0;
}

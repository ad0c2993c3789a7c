/*
 * Registers unwinding tables with the unwinder, as a just-in-time compiler does, while each block
 * is sampled. The unwinder then allocates and frees under its own lock. Run with the library
 * preloaded and PINFOLD_HEAP=1. Prints "ok".
 */
#define _GNU_SOURCE
#include "check.h"

#include <elf.h>
#include <execinfo.h>
#include <link.h>
#include <stdint.h>
#include <unistd.h>

extern void __register_frame(void *table);
extern void __deregister_frame(void *table);
extern ElfW(Ehdr) __ehdr_start;

/* Returns the program's own table of frames. */
static void *table(void)
{
	char *start = (char *)&__ehdr_start;
	ElfW(Phdr) *headers = (ElfW(Phdr) *)(start + __ehdr_start.e_phoff);

	for (int n = 0; n < __ehdr_start.e_phnum; n++)
		if (headers[n].p_type == PT_GNU_EH_FRAME) {
			/* The header's second word is the distance from there to the table. */
			char *distance = start + headers[n].p_vaddr + 4;
			return distance + *(int32_t *)distance;
		}
	return NULL;
}

int main(void)
{
	void *frames = table(), *callers[10];

	CHECK(frames);
	alarm(60);
	for (int n = 0; n < 300; n++) {
		__register_frame(frames);
		CHECK(backtrace(callers, 10) > 1);
		__deregister_frame(frames);
	}
	puts("ok");
	return 0;
}

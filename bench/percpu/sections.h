/*
 * sections.h - per-CPU operations in C with restartable sequences, as the peer of Pinfold's. They
 * follow librseq's convention: the caller reads the index and computes the address of the copy, the
 * section checks the index again and commits by one store, and the caller tries again after an
 * abort. Only for x86-64 and a C library that registers the rseq area.
 */
#ifndef SECTIONS_H
#define SECTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The bytes between the copies of two CPUs. */
#define STRIDE 65536
#define RECORD_WORDS 4
#define RING_SLOTS 1024

struct node {
	struct node *next;
	uint64_t value;
};

/* The data of one CPU. What the operations change lies in cache lines of its own. */
struct copy {
	uint64_t word __attribute__((aligned(64)));
	struct node *list __attribute__((aligned(64)));
	uint64_t pair[2] __attribute__((aligned(64)));
	uint64_t head __attribute__((aligned(64)));
	uint64_t tail __attribute__((aligned(64)));
	uint64_t slots[RING_SLOTS][RECORD_WORDS] __attribute__((aligned(64)));
};

/* The offset of the rseq area from the thread pointer, and that of the index in use. */
extern ptrdiff_t sections_area, sections_index;
/* The address of the first CPU's copy. */
extern char *sections_base;

#define inlined static inline __attribute__((always_inline))

inlined uint32_t current_index(void)
{
	uint32_t index;

	__asm__ volatile("movl %%fs:(%1), %0" : "=r"(index) : "r"(sections_index));
	return index;
}

inlined struct copy *copy_of(uint32_t index)
{
	return (struct copy *)(sections_base + (size_t)index * STRIDE);
}

/*
 * Wraps `body` into a critical section, which may use two scratch registers. The body ends with its
 * committing store. An abort goes to the C label `moved`.
 */
#define SECTION(body)                                                                       \
	".pushsection __rseq_cs, \"aw\", @progbits\n\t"                                     \
	".balign 32\n\t"                                                                    \
	"9:\n\t"                                                                            \
	".long 0, 0\n\t"                                                                    \
	".quad 3f, 4f - 3f, 5f\n\t"                                                         \
	".popsection\n\t"                                                                   \
	"leaq 9b(%%rip), %[first]\n\t"                                                      \
	"movq %[first], %%fs:8(%[area])\n\t"                                                \
	"3:\n\t"                                                                            \
	"cmpl %[cpu], %%fs:(%[index])\n\t"                                                  \
	"jne %l[moved]\n\t" body                                                            \
	"4:\n\t"                                                                            \
	".pushsection .text.unlikely, \"ax\", @progbits\n\t"                                \
	".byte 0x0f, 0xb9, 0x3d\n\t"                                                        \
	".long 0x53053053\n\t"                                                              \
	"5:\n\t"                                                                            \
	"jmp %l[moved]\n\t"                                                                 \
	".popsection\n\t"

#define PLACE [cpu] "r"(cpu), [area] "r"(sections_area), [index] "r"(sections_index)
#define SCRATCH [first] "=&r"(first), [second] "=&r"(second)
#define CHANGED "memory", "cc"

/* What became of a section. */
enum { DONE, DIFFERS, MOVED };

inlined int section_add(uint64_t *word, uint64_t n, uint32_t cpu)
{
	uint64_t first, second;

	__asm__ volatile goto(SECTION("addq %[n], %[word]\n\t")
		     : SCRATCH : PLACE, [word] "m"(*word), [n] "er"(n) : CHANGED : moved);
	return DONE;
moved:
	return MOVED;
}

inlined int section_fetch_add(uint64_t *word, uint64_t n, uint64_t *old, uint32_t cpu)
{
	uint64_t first, second;

	__asm__ volatile goto(SECTION("movq %[word], %[second]\n\t"
			     "movq %[second], %[old]\n\t"
			     "addq %[n], %[word]\n\t")
		     : SCRATCH : PLACE, [word] "m"(*word), [n] "er"(n), [old] "m"(*old) : CHANGED : moved);
	return DONE;
moved:
	return MOVED;
}

inlined int section_store_if_equal(uint64_t *word, uint64_t expected, uint64_t value, uint32_t cpu)
{
	uint64_t first, second;

	__asm__ volatile goto(SECTION("cmpq %[expected], %[word]\n\t"
			     "jne %l[differs]\n\t"
			     "movq %[value], %[word]\n\t")
		     : SCRATCH : PLACE, [word] "m"(*word), [expected] "r"(expected), [value] "r"(value)
		     : CHANGED : moved, differs);
	return DONE;
moved:
	return MOVED;
differs:
	return DIFFERS;
}

inlined int section_pair(uint64_t *pair, uint64_t old1, uint64_t old2, uint64_t new1, uint64_t new2,
			 uint32_t cpu)
{
	uint64_t first, second;

	__asm__ volatile goto(SECTION("cmpq %[old1], 0(%[pair])\n\t"
			     "jne %l[differs]\n\t"
			     "cmpq %[old2], 8(%[pair])\n\t"
			     "jne %l[differs]\n\t"
			     "movq %[new1], %%xmm0\n\t"
			     "movq %[new2], %%xmm1\n\t"
			     "punpcklqdq %%xmm1, %%xmm0\n\t"
			     "movaps %%xmm0, (%[pair])\n\t")
		     : SCRATCH : PLACE, [pair] "r"(pair), [old1] "r"(old1), [old2] "r"(old2),
			 [new1] "r"(new1), [new2] "r"(new2)
		     : CHANGED, "xmm0", "xmm1" : moved, differs);
	return DONE;
moved:
	return MOVED;
differs:
	return DIFFERS;
}

inlined int section_pop(struct node **list, struct node **popped, uint32_t cpu)
{
	uint64_t first, second;

	__asm__ volatile goto(SECTION("movq %[list], %[second]\n\t"
			     "testq %[second], %[second]\n\t"
			     "je %l[differs]\n\t"
			     "movq %[second], %[popped]\n\t"
			     "movq (%[second]), %[second]\n\t"
			     "movq %[second], %[list]\n\t")
		     : SCRATCH : PLACE, [list] "m"(*list), [popped] "m"(*popped)
		     : CHANGED : moved, differs);
	return DONE;
moved:
	return MOVED;
differs:
	return DIFFERS;
}

inlined int section_copy_store(uint64_t *word, uint64_t expected, uint64_t *to, const uint64_t *from,
			       size_t words, uint64_t value, uint32_t cpu)
{
	uint64_t first, second;

	__asm__ volatile goto(SECTION("cmpq %[expected], %[word]\n\t"
			     "jne %l[differs]\n\t"
			     "movq %[words], %[first]\n\t"
			     "7:\n\t"
			     "movq -8(%[from], %[first], 8), %[second]\n\t"
			     "movq %[second], -8(%[to], %[first], 8)\n\t"
			     "decq %[first]\n\t"
			     "jne 7b\n\t"
			     "movq %[value], %[word]\n\t")
		     : SCRATCH : PLACE, [word] "m"(*word), [expected] "r"(expected), [to] "r"(to),
			 [from] "r"(from), [words] "r"(words), [value] "r"(value)
		     : CHANGED : moved, differs);
	return DONE;
moved:
	return MOVED;
differs:
	return DIFFERS;
}

inlined void add(uint64_t n)
{
	uint32_t cpu;

	do
		cpu = current_index();
	while (section_add(&copy_of(cpu)->word, n, cpu) == MOVED);
}

inlined uint64_t add_return(uint64_t n)
{
	uint64_t old;
	uint32_t cpu;

	do
		cpu = current_index();
	while (section_fetch_add(&copy_of(cpu)->word, n, &old, cpu) == MOVED);
	return old + n;
}

inlined bool store_if_equal(uint64_t expected, uint64_t value)
{
	uint32_t cpu;
	int done;

	do {
		cpu = current_index();
		done = section_store_if_equal(&copy_of(cpu)->word, expected, value, cpu);
	} while (done == MOVED);
	return done == DONE;
}

inlined bool exchange_pair(uint64_t old1, uint64_t old2, uint64_t new1, uint64_t new2)
{
	uint32_t cpu;
	int done;

	do {
		cpu = current_index();
		done = section_pair(copy_of(cpu)->pair, old1, old2, new1, new2, cpu);
	} while (done == MOVED);
	return done == DONE;
}

inlined void push(struct node *node)
{
	struct node **list;
	uint32_t cpu;

	do {
		cpu = current_index();
		list = &copy_of(cpu)->list;
		node->next = __atomic_load_n(list, __ATOMIC_RELAXED);
	} while (section_store_if_equal((uint64_t *)list, (uint64_t)node->next, (uint64_t)node, cpu)
		 != DONE);
}

inlined struct node *pop(void)
{
	struct node *popped;
	uint32_t cpu;
	int done;

	do {
		cpu = current_index();
		done = section_pop(&copy_of(cpu)->list, &popped, cpu);
	} while (done == MOVED);
	return done == DONE ? popped : NULL;
}

inlined bool append(const uint64_t *record)
{
	struct copy *copy;
	uint64_t head;
	uint32_t cpu;

	do {
		cpu = current_index();
		copy = copy_of(cpu);
		head = __atomic_load_n(&copy->head, __ATOMIC_RELAXED);
		if (head - __atomic_load_n(&copy->tail, __ATOMIC_ACQUIRE) >= RING_SLOTS)
			return false;
	} while (section_copy_store(&copy->head, head, copy->slots[head % RING_SLOTS], record,
				    RECORD_WORDS, head + 1, cpu) != DONE);
	return true;
}

#endif

/*
 * Frees a block twice ("twice"), a large one ("large"), an address inside a large block ("inside"),
 * an address that is no block ("local"), or a block with a size that is not its own ("sized").
 */
#include <stdlib.h>
#include <string.h>

/* Finds no function in a program on another allocator. */
extern void free_sized(void *block, size_t size) __attribute__((weak));

__attribute__((noinline)) static void wrong_free(void *block)
{
	free(block);
}

int main(int argc, char **argv)
{
	char here = 0;
	char *volatile block = malloc(100);
	if (argc > 1 && strcmp(argv[1], "local") == 0)
		wrong_free(&here);
	if (argc > 1 && strcmp(argv[1], "sized") == 0) {
		free_sized(block, 30);
		block = malloc(5000000);
		free_sized(block, 6000000);
		return 0;
	}
	if (argc > 1 && (strcmp(argv[1], "large") == 0 || strcmp(argv[1], "inside") == 0)) {
		/* Few frees in a row do not all give the block to the arena. */
		for (int i = 0; i < 3; i++) {
			block = malloc(1000000);
			block[0] = 1;
			free(block);
		}
		wrong_free(strcmp(argv[1], "large") == 0 ? block : (char *)malloc(1000000) + 65536);
		return 0;
	}
	free(block);
	wrong_free(block);
	return 0;
}

/* Frees a block twice ("twice"), or an address that is no block ("local"). Does not return. */
#include <stdlib.h>
#include <string.h>

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
	free(block);
	wrong_free(block);
	return 0;
}

/* A plugin that reallocates and frees the blocks of its host, and gives blocks to it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *plugin_take(char *block)
{
	block = realloc(block, 4096);
	if (block)
		strcat(block, " world");
	return block;
}

void plugin_drop(char *block)
{
	free(block);
}

/* The C library allocates this block. */
char *plugin_line(void)
{
	char *line = NULL;
	return asprintf(&line, "%s", "line") < 0 ? NULL : line;
}

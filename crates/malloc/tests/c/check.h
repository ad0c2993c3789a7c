/* CHECK, for the test programs in C and C++. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

/*
 * Ends the process if `what` is false. Runs no exit handlers, because `what` may fail in a forked
 * child or beside other threads.
 */
#define CHECK(what)                                                                        \
	do {                                                                               \
		if (!(what)) {                                                             \
			fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__,      \
				#what, errno);                                             \
			_exit(1);                                                          \
		}                                                                          \
	} while (0)

#endif

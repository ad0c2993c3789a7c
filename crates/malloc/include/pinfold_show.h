/*
 * Pinfold: counters that other processes can see, by `pinfold vmstat PID`. pinfold.h includes this
 * header.
 */
#ifndef PINFOLD_SHOW_H
#define PINFOLD_SHOW_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

struct pinfold_counter;
struct pinfold_event;

/*
 * Show a counter to other processes under `name`. The name has 1 to 32 ASCII letters, digits or
 * characters of _.:-/ and no other counter has the name. Destroying the counter hides it. A static
 * counter of a library that may be unloaded must be hidden before.
 *
 * Other processes see the value of the last tick. With a shepherd's thread, the value is at most
 * the shepherd's interval old. Without one, it is from the last slow path of malloc or free.
 *
 * Return 0. Otherwise return -1 and set errno: EINVAL for a bad name, EEXIST if another counter has
 * the name, ENOSPC if 128 counters are shown, EBUSY in a signal handler that interrupted such a
 * call, ENOTSUP if the process shows no statistics (PINFOLD_SEGMENT=off, or a limit).
 */
int pinfold_counter_show(struct pinfold_counter *counter, const char *name);
int pinfold_event_show(struct pinfold_event *event, const char *name);

/* Ends the showing of a counter. Returns false if no counter is shown by this name. */
bool pinfold_hide(const char *name);

#ifdef __cplusplus
}
#endif

#endif

/*
 * A cache of sessions and counters in C, in four threads.
 *
 *	cc -pthread sessions.c $(pkg-config --cflags --libs pinfold) -o sessions
 */
#include <pinfold.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define THREADS 4
#define SESSIONS 10000

struct session {
	char peer[40];
	int port;
};

static struct pinfold_cache *sessions;
static struct pinfold_event opened = PINFOLD_EVENT_INIT;
static struct pinfold_counter open_now = PINFOLD_COUNTER_INIT(0);

/* Opens and closes sessions. Returns NULL if all went well. */
static void *work(void *unused)
{
	struct session *held[16] = { NULL };

	(void)unused;
	for (int i = 0; i < SESSIONS; i++) {
		struct session **slot = &held[i % 16];

		if (*slot) {
			pinfold_cache_free(sessions, *slot);
			pinfold_counter_dec(&open_now);
		}
		*slot = pinfold_cache_alloc(sessions);
		if (!*slot)
			return "no memory";
		strcpy((*slot)->peer, "10.0.0.1");
		(*slot)->port = i;
		pinfold_event_inc(&opened);
		pinfold_counter_inc(&open_now);
	}
	for (int i = 0; i < 16; i++) {
		pinfold_cache_free(sessions, held[i]);
		pinfold_counter_dec(&open_now);
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];

	sessions = pinfold_cache_create("session", sizeof(struct session), 0, 0, NULL);
	if (!sessions)
		return perror("session"), 1;
	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, work, NULL))
			return fputs("no thread\n", stderr), 1;
	for (int i = 0; i < THREADS; i++) {
		void *failure;

		pthread_join(threads[i], &failure);
		if (failure)
			return fprintf(stderr, "%s\n", (char *)failure), 1;
	}
	printf("opened %llu sessions, %lld are open\n",
	       (unsigned long long)pinfold_event_sum(&opened),
	       (long long)pinfold_counter_sum(&open_now));
	/* EBUSY would mean that a session was not freed. */
	if (pinfold_cache_destroy(sessions) == -1)
		return perror("session"), 1;
	return 0;
}

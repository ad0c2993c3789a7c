/*
 * A fork beside threads, handlers and stdio does not deadlock.
 *
 * fork takes the allocator's locks, and the program's by pthread_atfork, and the C library's. Every
 * other thread takes some of them too, in its own order.
 */
#include "edge.h"
#include "pinfold.h"
#include <sys/mman.h>

#pragma weak pinfold_heap_create
#pragma weak pinfold_heap_enter
#pragma weak pinfold_counter_create
#pragma weak pinfold_counter_add
#pragma weak pinfold_counter_sum

static volatile long forks, others;
static const char *what;

/* A program that makes no fork in this time is stuck. */
#define PATIENCE 8.0

static void block_signals(void)
{
	sigset_t all;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
}

/* Ends the process: with 0 after its time, with 1 if no fork ends any more. */
static void *watch(void *argument)
{
	block_signals();
	double end = now() + working_time(), moved = now();
	long seen = 0, at_end = -1;
	/* The last fork must end after the time is over. */
	for (; at_end < 0 || forks == at_end; sleep_for(0.05)) {
		if (forks != seen) {
			seen = forks;
			moved = now();
		} else if (now() - moved > PATIENCE)
			FAIL("STUCK after %ld forks and %ld %s", forks, others, what);
		if (at_end < 0 && now() > end)
			at_end = forks;
	}
	char line[100];
	snprintf(line, sizeof line, "%ld forks, %ld %s", forks, others, what);
	say(line);
	_exit(0);
	return argument;
}

/* Forks until the end. Each child does `work` and must end by itself. */
static void fork_on(void (*work)(void))
{
	for (;;) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			block_signals();
			if (work)
				work();
			_exit(0);
		}
		int status;
		for (double end = now() + PATIENCE; waitpid(child, &status, WNOHANG) == 0;) {
			if (now() > end) {
				kill(child, SIGKILL);
				FAIL("STUCK: a child does not end, after %ld forks", forks);
			}
			sched_yield();
		}
		if (status)
			FAIL("a child ended with status %#x", (unsigned)status);
		__sync_fetch_and_add(&forks, 1);
	}
}

static void allocate(void)
{
	churn(5, 200);
}

/* stdio: a thread flushes all streams, two read long lines. */

static int long_lines;

static void *flush(void *argument)
{
	for (;;) {
		fflush(NULL);
		others++;
	}
	return argument;
}

static void *read_lines(void *argument)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", long_lines);
	for (;;) {
		FILE *file = fopen(path, "r");
		CHECK(file);
		for (;;) {
			char *line = NULL;
			size_t room = 0;
			ssize_t length = getline(&line, &room, file);
			free(line);
			if (length < 0)
				break;
		}
		fclose(file);
	}
	return argument;
}

static void beside_stdio(void)
{
	enum { LENGTH = 150000 };
	static char line[LENGTH];
	long_lines = memfd_create("lines", 0);
	CHECK(long_lines >= 0);
	memset(line, 'x', LENGTH - 1);
	line[LENGTH - 1] = '\n';
	for (int i = 0; i < 10; i++)
		CHECK(write(long_lines, line, LENGTH) == LENGTH);
	what = "flushes";
	start(watch, NULL);
	start(flush, NULL);
	start(read_lines, NULL);
	start(read_lines, NULL);
	fork_on(NULL);
}

/* A lock of the program's own, which its handlers hold during a fork. */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int guarded;

static void lock_before(void)
{
	if (!guarded)
		return;
	pthread_mutex_lock(&lock);
	churn(7, 100);
}

static void unlock_after(void)
{
	if (!guarded)
		return;
	churn(8, 100);
	pthread_mutex_unlock(&lock);
}

/* Before main, and before the program's first malloc. */
__attribute__((constructor(101))) static void register_early(void)
{
	extern char **environ;
	for (char **variable = environ; *variable; variable++)
		if (!strcmp(*variable, "EDGE_EARLY_HANDLERS=1"))
			pthread_atfork(lock_before, unlock_after, unlock_after);
}

/* The heap from which threads allocate, or NULL. */
static struct pinfold_heap *heap;

static void *allocate_locked(void *seed)
{
	if (heap)
		CHECK(pinfold_heap_enter(heap) == 0);
	for (unsigned i = 0;; i++) {
		pthread_mutex_lock(&lock);
		churn((unsigned)(size_t)seed + i, 100);
		pthread_mutex_unlock(&lock);
		others++;
	}
	return seed;
}

static void with_handlers(const char *early)
{
	if (early && !getenv("EDGE_EARLY_HANDLERS")) {
		setenv("EDGE_EARLY_HANDLERS", "1", 1);
		execl("/proc/self/exe", "forks", early, (char *)NULL);
		FAIL("execl: %s", strerror(errno));
	}
	if (!early)
		pthread_atfork(lock_before, unlock_after, unlock_after);
	if (early && !strcmp(early, "scopes") && pinfold_heap_create)
		CHECK(heap = pinfold_heap_create("scope", 0, 0, NULL));
	guarded = 1;
	what = "locked rounds";
	start(watch, NULL);
	for (size_t i = 0; i < 2; i++)
		start(allocate_locked, (void *)i);
	fork_on(allocate);
}

/* A signal handler that allocates, above a thread that maps, unmaps and counts. */

static volatile int handles;
static pthread_t interrupted;
static struct pinfold_counter *counter;

static void on_signal(int number)
{
	(void)number;
	int before = errno;
	static const size_t sizes[] = { 40000, 110000, 180000, 1, 100, 5000, 3000000 };
	for (size_t i = 0; handles && i < sizeof sizes / sizeof *sizes; i++) {
		char *block = malloc(sizes[i]);
		CHECK(block);
		block[0] = block[sizes[i] - 1] = 1;
		free(block);
	}
	others++;
	errno = before;
}

static void *map_and_count(void *argument)
{
	for (size_t i = 0;; i++) {
		char *block = malloc(i % 8 ? 3 << 20 : 200000);
		CHECK(block);
		block[0] = 1;
		free(block);
		if (counter) {
			pinfold_counter_add(counter, 1);
			if (i % 64 == 0)
				(void)pinfold_counter_sum(counter);
		}
	}
	return argument;
}

static void *interrupt(void *argument)
{
	block_signals();
	for (;;) {
		pthread_kill(interrupted, SIGUSR1);
		sleep_for(0.00002);
	}
	return argument;
}

/* Most allocators do not promise malloc in handlers, so EDGE_CONTROL leaves the handler empty. */
static void with_signals(void)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	handles = getenv("EDGE_CONTROL") == NULL;
	if (pinfold_counter_create)
		counter = pinfold_counter_create(0, 64);
	sigaction(SIGUSR1, &action, NULL);
	what = "handlers";
	start(watch, NULL);
	interrupted = start(map_and_count, NULL);
	start(interrupt, NULL);
	block_signals();
	fork_on(NULL);
}

/* Several threads fork at once, and the children have threads too. */

static void *allocate_a_while(void *seed)
{
	churn((unsigned)(size_t)seed, 500);
	return NULL;
}

static void allocate_in_threads(void)
{
	pthread_t threads[2];
	churn(3, 200);
	for (size_t i = 0; i < 2; i++)
		threads[i] = start(allocate_a_while, (void *)i);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
}

static void *fork_in_thread(void *argument)
{
	fork_on(allocate_in_threads);
	return argument;
}

static void *allocate_on(void *seed)
{
	for (unsigned i = 0;; i++) {
		churn((unsigned)(size_t)seed + i, 500);
		others++;
	}
	return seed;
}

static void from_many_threads(void)
{
	what = "rounds";
	start(watch, NULL);
	for (size_t i = 0; i < 2; i++) {
		start(allocate_on, (void *)i);
		start(fork_in_thread, NULL);
	}
	fork_on(allocate_in_threads);
}

/* Handlers fork above threads in the allocator, in two threads at once. */

static void fork_on_signal(int number)
{
	(void)number;
	int before = errno;
	pid_t child = handles ? fork() : -1;
	if (child == 0)
		_exit(0);
	while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR)
		;
	__sync_fetch_and_add(&forks, 1);
	errno = before;
}

static void *allocate_large(void *seed)
{
	unsigned random = (unsigned)(size_t)seed;
	char *blocks[32];
	for (;;) {
		for (int i = 0; i < 32; i++) {
			random = random * 1664525 + 1013904223;
			blocks[i] = malloc(20000 + random % 300000);
			CHECK(blocks[i]);
		}
		for (int i = 0; i < 32; i++)
			free(blocks[i]);
	}
	return seed;
}

/* glibc gets stuck here, so EDGE_CONTROL leaves the fork out. */
static void from_handlers(void)
{
	struct sigaction action = { .sa_handler = fork_on_signal, .sa_flags = SA_RESTART };
	pthread_t threads[2];
	handles = getenv("EDGE_CONTROL") == NULL;
	sigaction(SIGUSR1, &action, NULL);
	what = "others";
	for (size_t i = 0; i < 2; i++)
		threads[i] = start(allocate_large, (void *)i);
	start(watch, NULL);
	block_signals();
	for (;;) {
		sleep_for(0.0005);
		pthread_kill(threads[0], SIGUSR1);
		pthread_kill(threads[1], SIGUSR1);
	}
}

int main(int count, char **words)
{
	const char *name = count > 1 ? words[1] : "";
	working_time();
	if (!strcmp(name, "stdio"))
		beside_stdio();
	else if (!strcmp(name, "handlers"))
		with_handlers(NULL);
	else if (!strcmp(name, "early-handlers"))
		with_handlers(name);
	else if (!strcmp(name, "scopes"))
		with_handlers(name);
	else if (!strcmp(name, "signals"))
		with_signals();
	else if (!strcmp(name, "many"))
		from_many_threads();
	else if (!strcmp(name, "from-handlers"))
		from_handlers();
	FAIL("no such case");
}

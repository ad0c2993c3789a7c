// Runs one program under an allocator and reports what the program cost.
//
//     launch REPORT LIMIT PRELOAD USER -- PROGRAM [ARGUMENT]...
//
// REPORT is the file that gets one line of JSON. LIMIT is in seconds: a program that takes longer
// is killed. PRELOAD is the shared library for LD_PRELOAD, or "-" for none. USER is the number of
// the user and group to run as, or "-" for the caller's.
//
// A program inherits a peak of resident memory from the process that started it, because exec
// carries the peak of the old memory over. This launcher is linked statically and needs well below
// 1 MiB, less than any dynamically linked program. So the peak that it reports is the program's
// own.
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static pid_t program;
static volatile sig_atomic_t timed_out;

static void end_program(int signal_number) {
    timed_out = signal_number == SIGALRM;
    kill(-program, SIGKILL);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double seconds(struct timeval t) { return (double)t.tv_sec + (double)t.tv_usec / 1e6; }

static void fail(const char *what) {
    fprintf(stderr, "launch: %s: %s\n", what, strerror(errno));
    exit(127);
}

int main(int argc, char **argv) {
    if (argc < 7) {
        fprintf(stderr, "usage: launch REPORT LIMIT PRELOAD USER -- PROGRAM [ARGUMENT]...\n");
        return 127;
    }
    const char *report = argv[1], *preload = argv[3], *user = argv[4];
    // When the parent ends, this launcher ends the program and then itself.
    signal(SIGTERM, end_program);
    signal(SIGINT, end_program);
    signal(SIGALRM, end_program);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    double start = now();
    program = fork();
    if (program < 0) fail("cannot fork");
    if (program == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (strcmp(user, "-") != 0) {
            unsigned id = (unsigned)strtoul(user, NULL, 10);
            if (setgroups(0, NULL) || setgid(id) || setuid(id)) fail("cannot change the user");
        }
        if (strcmp(preload, "-") != 0) setenv("LD_PRELOAD", preload, 1);
        execv(argv[6], argv + 6);
        fail(argv[6]);
    }
    setpgid(program, program);
    alarm((unsigned)strtoul(argv[2], NULL, 10));
    int status;
    struct rusage usage;
    while (wait4(program, &status, 0, &usage) < 0)
        if (errno != EINTR) fail("cannot wait");
    double end = now();
    // Processes that the program left behind would disturb the next measurement.
    kill(-program, SIGKILL);
    FILE *file = fopen(report, "w");
    if (!file) fail(report);
    fprintf(file,
            "{\"seconds\":%.6f,\"cpu_seconds\":%.6f,\"peak_rss_bytes\":%ld,\"faults\":%ld,"
            "\"exit\":%d,\"signal\":%d,\"timed_out\":%s}\n",
            end - start, seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_maxrss * 1024,
            usage.ru_minflt + usage.ru_majflt, WIFEXITED(status) ? WEXITSTATUS(status) : -1,
            WIFSIGNALED(status) ? WTERMSIG(status) : 0, timed_out ? "true" : "false");
    return fclose(file) ? 127 : 0;
}

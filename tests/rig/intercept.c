/* Counts the file system calls of a process below one folder, and fails, delays or kills at a chosen one.

   Loaded with LD_PRELOAD and idle until rig_arm(). Each wrapper asks before() for a verdict: 0 lets the call pass, a
   positive errno makes it fail, KILL_NOW_AFTER kills once the call has returned, SHORTEN halves a write. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { NO_FAULT, KILL_BEFORE, KILL_AFTER, EIO_ONCE, EIO_ON, ENOSPC_ON, SHORT_WRITE, SEND_SIGTERM, SEND_SIGINT, DELAY, SLOW_SAVES };
enum { KILL_NOW_AFTER = -1, SHORTEN = -2 };

static char armed[4096];
static size_t armed_length;
static long fault_at, calls;
static int fault, log_fd = -1;

/* `n`: the call, counted from 1, at which `what` happens, or from which on each call below .tmp-* takes 10 ms longer.
   `log`: a descriptor that gets a line per call, or -1. */
void rig_arm(const char *folder, long n, int what, int log) {
    strncpy(armed, folder, sizeof armed - 1);
    fault_at = n, fault = what, log_fd = log, calls = 0;
    armed_length = strlen(armed);
}

long rig_calls(void) { return calls; }

static int below(const char *path) {
    return strncmp(path, armed, armed_length) == 0 && (path[armed_length] == '/' || path[armed_length] == 0);
}

static ssize_t of_fd(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length >= 0) path[length] = 0;
    return length;
}

static const char *absolute(int folder, const char *path, char *buffer, size_t size) {
    if (path[0] == '/') return path;
    ssize_t length = folder == AT_FDCWD ? readlink("/proc/self/cwd", buffer, size - 1) : of_fd(folder, buffer, size);
    if (length < 0) return path;
    snprintf(buffer + length, size - length, "/%s", path);
    return buffer;
}

static int allocates(const char *call) {
    return strchr("wcmtr", call[0]) != NULL || strcmp(call, "fsync") == 0;
}

static int before(const char *call, const char *path) {
    if (!armed_length || !below(path)) return 0;
    long n = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (log_fd >= 0) dprintf(log_fd, "%s %s\n", call, path);
    if (n < fault_at || fault_at < 1) return 0;
    struct timespec moment = {0, 10000000};
    if (fault == SLOW_SAVES) return strstr(path, "/.tmp-") ? nanosleep(&moment, NULL) & 0 : 0;
    if (fault == EIO_ON) return EIO;
    if (fault == ENOSPC_ON) return allocates(call) ? ENOSPC : 0;
    if (n != fault_at) return 0;
    struct timespec pause = {0, 300000000};
    switch (fault) {
    case KILL_BEFORE: kill(getpid(), SIGKILL); return 0;
    case KILL_AFTER: return KILL_NOW_AFTER;
    case EIO_ONCE: return EIO;
    case SHORT_WRITE: return SHORTEN;
    case SEND_SIGTERM: kill(getpid(), SIGTERM); return 0;
    case SEND_SIGINT: kill(getpid(), SIGINT); return 0;
    case DELAY: nanosleep(&pause, NULL); return 0;
    }
    return 0;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define JUDGED(call, path, expression)              \
    int verdict = before(call, path);               \
    if (verdict > 0) return errno = verdict, -1;    \
    __auto_type result = expression;                \
    if (verdict == KILL_NOW_AFTER) kill(getpid(), SIGKILL); \
    return result;

#define ON_FD(name, call, parameters, arguments)                        \
    int name parameters {                                               \
        char path[4096] = "";                                           \
        if (armed_length) of_fd(fd, path, sizeof path);                 \
        JUDGED(call, path, REAL(name) arguments)                        \
    }
ON_FD(fsync, "fsync", (int fd), (fd))
ON_FD(fdatasync, "fsync", (int fd), (fd))
ON_FD(ftruncate, "truncate", (int fd, off_t length), (fd, length))
ON_FD(ftruncate64, "truncate", (int fd, off64_t length), (fd, length))

ssize_t write(int fd, const void *data, size_t count) {
    char path[4096] = "";
    if (armed_length) of_fd(fd, path, sizeof path);
    int verdict = before("write", path);
    if (verdict > 0) return errno = verdict, -1;
    ssize_t result = REAL(write)(fd, data, verdict == SHORTEN && count > 1 ? count / 2 : count);
    if (verdict == KILL_NOW_AFTER) kill(getpid(), SIGKILL);
    return result;
}

#define ON_PATH(name, call, parameters, arguments)                                                     \
    int name parameters {                                                                              \
        char buffer[8192];                                                                             \
        JUDGED(call, absolute(folder_of_##name, path, buffer, sizeof buffer), REAL(name) arguments)    \
    }
#define folder_of_unlink AT_FDCWD
#define folder_of_rmdir AT_FDCWD
#define folder_of_mkdir AT_FDCWD
#define folder_of_rename AT_FDCWD
#define folder_of_unlinkat folder
#define folder_of_mkdirat folder
#define folder_of_renameat folder
#define folder_of_renameat2 folder
ON_PATH(unlink, "unlink", (const char *path), (path))
ON_PATH(rmdir, "unlink", (const char *path), (path))
ON_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode))
ON_PATH(rename, "rename", (const char *path, const char *to), (path, to))
ON_PATH(unlinkat, "unlink", (int folder, const char *path, int flags), (folder, path, flags))
ON_PATH(mkdirat, "mkdir", (int folder, const char *path, mode_t mode), (folder, path, mode))
ON_PATH(renameat, "rename", (int folder, const char *path, int other, const char *to), (folder, path, other, to))
ON_PATH(renameat2, "rename", (int folder, const char *path, int other, const char *to, unsigned flags),
        (folder, path, other, to, flags))

#define OPENS(name, first, folder, parameters, arguments)                                  \
    int name parameters {                                                                  \
        char buffer[8192];                                                                 \
        va_list rest;                                                                      \
        va_start(rest, flags);                                                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;            \
        va_end(rest);                                                                      \
        JUDGED(flags & O_CREAT ? "create" : "open", absolute(folder, path, buffer, sizeof buffer), REAL(name) arguments) \
    }
OPENS(open, path, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, path, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENS(openat, folder, folder, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPENS(openat64, folder, folder, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))

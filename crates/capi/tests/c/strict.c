// What was let pass once: structures of no version, reserved fields, addressees of zero, signals, small stacks.
//
//     strict SOCKET

#include "../../examples/common.h"

#include <dirent.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

// What gpu_ipc.h says that a thread needs.
enum { STACK = 256 << 10 };

#define SAYS(code, word, call)                                                                                         \
    do {                                                                                                               \
        int32_t got_ = (call);                                                                                         \
        const char *text_ = gpu_ipc_last_error_text();                                                                 \
        if (got_ != (code) || strstr(text_, word) == NULL) {                                                           \
            fprintf(stderr, "%s:%d: %s gives %d (%s), not %d\n", __FILE__, __LINE__, #call, (int)got_, text_,          \
                    (int)(code));                                                                                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static gpu_ipc_device *device;
static gpu_ipc_stream *stream;
static gpu_ipc_session *session;
static gpu_ipc_participant *participant;
static gpu_ipc_block *block;
static const char *socket_path;

// The first calls of the process, on the smallest stack.
static void *first_calls(void *unused)
{
    gpu_ipc_session_options options = {.size = sizeof options, .socket = socket_path};
    gpu_ipc_descriptor descriptor;
    gpu_ipc_received *received;
    (void)unused;
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device");
    check(gpu_ipc_stream_create(device, &stream), "stream");
    check(gpu_ipc_session_open(device, &options, &session), "session");
    check(gpu_ipc_connect(device, socket_path, NULL, &participant), "connect");
    check(gpu_ipc_alloc(session, 4096, 0, &block), "alloc");
    check(gpu_ipc_block_write(block, 0, "small", 5, stream), "write");
    check(gpu_ipc_share_ticket(block, 1, stream, NULL, &descriptor), "share");
    check(gpu_ipc_claim(participant, &descriptor, sizeof descriptor, GPU_IPC_WAIT, stream, -1, &received), "claim");
    check(gpu_ipc_received_close(received), "close");
    check(gpu_ipc_block_wait_released(block, -1), "wait");
    // A failure with causes is the longest way to a text.
    SAYS(GPU_IPC_CONNECT, "cannot connect", gpu_ipc_connect(device, "/nowhere/s", NULL, &(gpu_ipc_participant *){NULL}));
    return NULL;
}

static void a_small_stack(void)
{
    pthread_attr_t small;
    pthread_t thread;
    pthread_attr_init(&small);
    require(pthread_attr_setstacksize(&small, STACK) == 0, "no such stack");
    require(pthread_create(&thread, &small, first_calls, NULL) == 0, "no thread");
    pthread_join(thread, NULL);
    pthread_attr_destroy(&small);
}

static void the_version(void)
{
    require(gpu_ipc_version() == GPU_IPC_VERSION, "the header is of another library");
    require(GPU_IPC_VERSION == GPU_IPC_VERSION_MAJOR * 1000000 + GPU_IPC_VERSION_MINOR * 1000 + GPU_IPC_VERSION_PATCH,
            "another number");
#if GPU_IPC_VERSION < 2000
#error "the preprocessor cannot compare versions"
#endif
}

// Each size that is none, of a structure that a call reads and of one that it fills.
static void sizes(void)
{
    gpu_ipc_session *other = NULL;
    gpu_ipc_session_options options = {.size = 0};
    gpu_ipc_stats stats = {.size = 0};
    gpu_ipc_device_info info = {.size = offsetof(gpu_ipc_device_info, total_bytes), .total_bytes = 77};
    for (size_t size = 0; size < sizeof options; ++size) {
        options.size = size;
        SAYS(GPU_IPC_INVALID, "the size of a structure", gpu_ipc_session_open(device, &options, &other));
        require(other == NULL, "a session");
    }
    for (size_t size = 0; size < sizeof stats; ++size) {
        stats.size = size;
        SAYS(GPU_IPC_INVALID, "the size of a structure", gpu_ipc_session_get_stats(session, &stats));
        require(stats.live_blocks == 0, "something was filled in");
    }
    SAYS(GPU_IPC_INVALID, "the size of a structure", gpu_ipc_device_get_info(device, &info));
    require(info.total_bytes == 77, "something was filled in");
    stats.size = sizeof stats;
    check(gpu_ipc_session_get_stats(session, &stats), "stats");
}

static void reserved_fields_and_addressees(void)
{
    uint64_t number = gpu_ipc_participant_id(participant);
    gpu_ipc_descriptor descriptor;
    gpu_ipc_participant *other;
    gpu_ipc_received *received;
    gpu_ipc_connect_options connect = {.size = sizeof connect, .reserved = 1};
    gpu_ipc_grant grant = {.block = block, .participant = number, .reserved = 7};
    SAYS(GPU_IPC_UNSUPPORTED, "reserved", gpu_ipc_connect(device, socket_path, &connect, &other));
    SAYS(GPU_IPC_UNSUPPORTED, "reserved", gpu_ipc_share_many(session, &grant, 1, stream, NULL, &descriptor));
    grant = (gpu_ipc_grant){.block = block};
    SAYS(GPU_IPC_INVALID, "participant 0 with 0 claims", gpu_ipc_share_many(session, &grant, 1, stream, NULL, &descriptor));
    grant = (gpu_ipc_grant){.block = block, .participant = number, .claims = 1};
    SAYS(GPU_IPC_INVALID, "the claims", gpu_ipc_share_many(session, &grant, 1, stream, NULL, &descriptor));
    SAYS(GPU_IPC_INVALID, "participant 0 with 0 claims", gpu_ipc_share_ticket(block, 0, stream, NULL, &descriptor));
    SAYS(GPU_IPC_PARTICIPANT_GONE, "gone", gpu_ipc_share(block, 0, stream, NULL, &descriptor));
    require(gpu_ipc_block_outstanding(block) == 0, "something was granted");
    check(gpu_ipc_share(block, number, stream, NULL, &descriptor), "share");
    check(gpu_ipc_claim(participant, &descriptor, sizeof descriptor, GPU_IPC_WAIT, NULL, -1, &received), "claim");
    SAYS(GPU_IPC_INVALID, "participant 0 with 0 claims", gpu_ipc_received_forward(received, 0, 0, -1, &descriptor));
    check(gpu_ipc_received_close(received), "close");
}

static void errors_and_texts(void)
{
    char bytes[8];
    const char *text = gpu_ipc_last_error_text();
    gpu_ipc_clear_error();
    require(gpu_ipc_last_error() == GPU_IPC_OK && text[0] == 0, "the last error is not forgotten");
    require(gpu_ipc_block_outstanding(NULL) == SIZE_MAX, "no block is free");
    require(gpu_ipc_last_error() == GPU_IPC_BAD_HANDLE, "another error");
    // What was read before shows the newer text, at the same place.
    require(strstr(text, "a block is null") != NULL && text == gpu_ipc_last_error_text(), text);
    check(gpu_ipc_stream_synchronize(stream), "synchronize");
    require(gpu_ipc_last_error() == GPU_IPC_BAD_HANDLE, "a call that succeeds forgets the error");
    SAYS(GPU_IPC_INVALID, "the length of a buffer", gpu_ipc_block_read(block, 0, bytes, SIZE_MAX, stream));
    SAYS(GPU_IPC_INVALID, "buffer is null", gpu_ipc_session_path(session, NULL, 100));
    SAYS(GPU_IPC_INVALID, "1 bytes", gpu_ipc_session_path(session, bytes, 1));
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool was_released, blocks_signals;

static void released(void *context)
{
    sigset_t mask;
    (void)context;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    pthread_mutex_lock(&lock);
    blocks_signals = sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGUSR1) == 1
                     && sigismember(&mask, SIGALRM) == 1 && sigismember(&mask, SIGSEGV) == 0;
    was_released = true;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

// The program blocks SIGTERM after the library has started its threads, and reads it from a descriptor.
static void signals_are_the_programs(void)
{
    gpu_ipc_stream *borrowed;
    check(gpu_ipc_stream_borrow(device, NULL, released, NULL, &borrowed), "borrow");
    check(gpu_ipc_stream_close(borrowed), "close");
    pthread_mutex_lock(&lock);
    while (!was_released) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    require(blocks_signals, "a callback's thread takes signals");

    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &term, NULL);
    int fd = signalfd(-1, &term, SFD_CLOEXEC);
    require(fd >= 0 && kill(getpid(), SIGTERM) == 0, "no signal");
    struct signalfd_siginfo info;
    require(read(fd, &info, sizeof info) == (ssize_t)sizeof info && info.ssi_signo == SIGTERM, "another signal");
    close(fd);
    pthread_sigmask(SIG_UNBLOCK, &term, NULL);
}

// Lines for a reader that has gone, from this thread and from those of the library.
static void a_log_without_a_reader(void)
{
    int ends[2];
    require(pipe(ends) == 0, "no pipe");
    check(gpu_ipc_log_to(ends[1], GPU_IPC_LOG_DEBUG), "log");
    close(ends[0]);
    close(ends[1]);
    gpu_ipc_participant *visitor;
    for (int round = 0; round < 10; ++round) {
        check(gpu_ipc_connect(device, socket_path, NULL, &visitor), "connect");
        check(gpu_ipc_participant_leave(visitor, -1), "leave");
    }
    sigset_t pending;
    sigpending(&pending);
    require(sigismember(&pending, SIGPIPE) == 0, "a SIGPIPE is left");
    check(gpu_ipc_log_to(-1, GPU_IPC_LOG_WARN), "log");
}

static char later_path[4096];
static gpu_ipc_participant *early;
static int thread_number = -1;

static void *connect_early(void *unused)
{
    gpu_ipc_connect_options options = {.size = sizeof options, .wait_for_producer_ns = -1};
    (void)unused;
    pthread_mutex_lock(&lock);
    thread_number = gettid();
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    check(gpu_ipc_connect(device, later_path, &options, &early), "connect early");
    return NULL;
}

// Whether a thread sleeps, as it does between two looks for a producer.
static bool sleeps(int number)
{
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", number);
    FILE *file = fopen(path, "r");
    bool read_it = file != NULL && fgets(line, sizeof line, file) != NULL;
    if (file != NULL) {
        fclose(file);
    }
    // nanosleep and clock_nanosleep of x86-64.
    return !read_it || strncmp(line, "35 ", 3) == 0 || strncmp(line, "230 ", 4) == 0;
}

static void a_consumer_that_starts_first(void)
{
    gpu_ipc_connect_options options = {.size = sizeof options};
    gpu_ipc_session_options listen = {.size = sizeof listen, .socket = later_path};
    gpu_ipc_session *later;
    gpu_ipc_participant *none;
    pthread_t thread;
    require((size_t)snprintf(later_path, sizeof later_path, "%s-later", socket_path) < sizeof later_path, "too long");
    SAYS(GPU_IPC_CONNECT, "no such socket", gpu_ipc_connect(device, later_path, &options, &none));
    options.wait_for_producer_ns = 1000000;
    SAYS(GPU_IPC_CONNECT, "no such socket", gpu_ipc_connect(device, later_path, &options, &none));
    require(pthread_create(&thread, NULL, connect_early, NULL) == 0, "no thread");
    pthread_mutex_lock(&lock);
    while (thread_number < 0) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    while (!sleeps(thread_number)) {
        poll(NULL, 0, 1);
    }
    check(gpu_ipc_session_open(device, &listen, &later), "session");
    pthread_join(thread, NULL);
    check(gpu_ipc_participant_leave(early, -1), "leave");
    check(gpu_ipc_session_shutdown(later, -1), "shutdown");
    check(gpu_ipc_session_close(later), "close");
}

int main(int argc, char **argv)
{
    size_t connected;
    require(argc == 2, "usage: strict SOCKET");
    socket_path = argv[1];
    the_version();
    a_small_stack();
    sizes();
    reserved_fields_and_addressees();
    errors_and_texts();
    signals_are_the_programs();
    a_log_without_a_reader();
    a_consumer_that_starts_first();
    check(gpu_ipc_block_close(block), "close");
    check(gpu_ipc_participant_leave(participant, -1), "leave");
    check(gpu_ipc_session_shutdown(session, -1), "shutdown");
    // Not for ever: no participant can come.
    SAYS(GPU_IPC_CLOSING, "shutting down", gpu_ipc_session_participants(session, 1, -1, NULL, 0, &connected));
    check(gpu_ipc_session_close(session), "close");
    check(gpu_ipc_stream_close(stream), "close");
    check(gpu_ipc_device_close(device), "close");
    printf("strict: nothing was guessed\n");
    return 0;
}

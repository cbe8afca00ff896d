// What a program does right, once each: what the examples leave out.
//
//     usual SOCKET

#include "../../examples/common.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SHARED = 3 };

static gpu_ipc_device *device;
static gpu_ipc_stream *stream;
static gpu_ipc_session *session;
static gpu_ipc_participant *first, *second;

static void wait_for_notice(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    require(poll(&ready, 1, 60000) == 1, "no notice");
}

static void devices(void)
{
    gpu_ipc_device *found[16];
    size_t count = 0;
    check(gpu_ipc_detect(found, 16, &count), "detect");
    require(count > 0, "no device");
    for (size_t at = 0; at < count && at < 16; ++at) {
        gpu_ipc_device_info info = {.size = sizeof info};
        check(gpu_ipc_device_get_info(found[at], &info), "info");
        require(info.backend != 0 && info.total_bytes > 0 && info.name[0] != 0, "a device without a name");
        check(gpu_ipc_device_close(found[at]), "close");
    }
}

static void options_and_user_bytes(gpu_ipc_block *block)
{
    gpu_ipc_share_options options = {.size = sizeof options, .time_to_live_ns = -1, .user = {1, 2, 3}};
    gpu_ipc_descriptor descriptor;
    gpu_ipc_descriptor_info info = {.size = sizeof info};
    bool cancelled = false;
    check(gpu_ipc_share(block, gpu_ipc_participant_id(first), stream, &options, &descriptor), "share");
    check(gpu_ipc_descriptor_get_info(&descriptor, sizeof descriptor, &info), "info");
    require(memcmp(info.user, options.user, sizeof info.user) == 0, "other bytes of the user's");
    require(info.len == 4096 && info.participant == gpu_ipc_participant_id(first), "another grant");
    check(gpu_ipc_block_cancel(block, &descriptor, &cancelled), "cancel");
    require(cancelled, "nobody had claimed it");
    gpu_ipc_received *received;
    require(gpu_ipc_claim(first, &descriptor, sizeof descriptor, GPU_IPC_WAIT, NULL, -1, &received) == GPU_IPC_REVOKED,
            "it was taken back");
    gpu_ipc_notice notice;
    do {
        wait_for_notice(gpu_ipc_participant_fd(first));
        check(gpu_ipc_participant_next_notice(first, &notice), "notice");
    } while (notice.kind != GPU_IPC_NOTICE_REVOKED);
}

static void several_at_once(void)
{
    gpu_ipc_block *blocks[SHARED];
    gpu_ipc_grant grants[SHARED];
    gpu_ipc_descriptor descriptors[SHARED + 1];
    gpu_ipc_received *received[SHARED + 1];
    int32_t codes[SHARED + 1];
    for (int at = 0; at < SHARED; ++at) {
        check(gpu_ipc_alloc(session, 4096, 1000000, &blocks[at]), "alloc");
        grants[at] = (gpu_ipc_grant){.block = blocks[at], .claims = 1};
    }
    grants[0] = (gpu_ipc_grant){.block = blocks[0], .participant = gpu_ipc_participant_id(first)};
    check(gpu_ipc_share_many(session, grants, SHARED, stream, NULL, descriptors), "share many");
    memset(&descriptors[SHARED], 0, sizeof descriptors[SHARED]);
    check(gpu_ipc_participant_prefetch(first, descriptors, SHARED), "prefetch");
    require(gpu_ipc_claim_many(first, descriptors, SHARED + 1, GPU_IPC_WAIT, stream, -1, received, codes)
                == GPU_IPC_BAD_DESCRIPTOR,
            "the last is no descriptor");
    for (int at = 0; at < SHARED; ++at) {
        require(codes[at] == GPU_IPC_OK && received[at] != NULL, "one was not claimed");
        require(gpu_ipc_block_outstanding(blocks[at]) == 1, "another number of leases");
    }
    require(codes[SHARED] == GPU_IPC_BAD_DESCRIPTOR && received[SHARED] == NULL, "what is none was claimed");
    check(gpu_ipc_received_close_many(received, SHARED + 1), "close many");
    for (int at = 0; at < SHARED; ++at) {
        check(gpu_ipc_block_wait_released(blocks[at], -1), "wait");
        check(gpu_ipc_block_close(blocks[at]), "close");
    }
}

static void forward_with_user_bytes(gpu_ipc_received *received)
{
    const uint8_t user[65] = "frame 7";
    const uint64_t to = gpu_ipc_participant_id(first);
    gpu_ipc_descriptor onward;
    gpu_ipc_descriptor_info info = {.size = sizeof info};
    gpu_ipc_received *forwarded;
    check(gpu_ipc_received_forward_with(received, to, 0, user, 64, -1, &onward), "forward with bytes");
    check(gpu_ipc_descriptor_get_info(onward.bytes, sizeof onward.bytes, &info), "info");
    require(memcmp(info.user, user, 64) == 0, "other bytes of the user's");
    check(gpu_ipc_claim(first, &onward, sizeof onward, GPU_IPC_WAIT, NULL, -1, &forwarded), "claim");
    require(gpu_ipc_received_len(forwarded) == gpu_ipc_received_len(received), "another part");
    check(gpu_ipc_received_close(forwarded), "close");
    check(gpu_ipc_received_forward_with(received, 0, 1, user, 5, -1, &onward), "forward with 5 bytes");
    check(gpu_ipc_descriptor_get_info(onward.bytes, sizeof onward.bytes, &info), "info");
    require(memcmp(info.user, "frame\0\0", 7) == 0, "what is left out is not zero");
    check(gpu_ipc_session_revoke(session, &onward, NULL), "revoke");
    require(gpu_ipc_received_forward_with(received, to, 0, user, 65, -1, &onward) == GPU_IPC_INVALID
                && strstr(gpu_ipc_last_error_text(), "65 bytes") != NULL,
            "65 bytes");
    require(gpu_ipc_received_forward_with(received, to, 0, NULL, 1, -1, &onward) == GPU_IPC_INVALID, "no bytes");
    require(gpu_ipc_received_forward_with(received, 0, 0, user, 5, -1, &onward) == GPU_IPC_INVALID, "no addressee");
}

static void tickets_and_event_loops(gpu_ipc_block *block)
{
    gpu_ipc_descriptor ticket, unused;
    gpu_ipc_received *received;
    gpu_ipc_notice notice;
    check(gpu_ipc_share_ticket(block, 2, stream, NULL, &ticket), "ticket");
    check(gpu_ipc_share_ticket(block, GPU_IPC_EVERYBODY, NULL, NULL, &unused), "ticket");
    require(gpu_ipc_block_wait_released(block, 0) == GPU_IPC_DEADLINE, "a ticket counts");
    int32_t code;
    while ((code = gpu_ipc_try_claim(second, &ticket, sizeof ticket, GPU_IPC_WAIT, stream, &received))
           == GPU_IPC_WOULD_BLOCK) {
        do {
            wait_for_notice(gpu_ipc_participant_fd(second));
            check(gpu_ipc_participant_next_notice(second, &notice), "notice");
        } while (notice.kind != GPU_IPC_NOTICE_TRY_AGAIN);
    }
    check(code, "try claim");
    gpu_ipc_received *without;
    check(gpu_ipc_claim(first, &ticket, sizeof ticket, GPU_IPC_NO_WAIT, NULL, -1, &without), "claim");
    check(gpu_ipc_received_wait(without, NULL, -1), "wait");
    check(gpu_ipc_received_wait(without, stream, -1), "wait");
    gpu_ipc_received *early = NULL;
    code = gpu_ipc_try_claim(first, &unused, sizeof unused, GPU_IPC_WAIT, NULL, &early);
    require(code == GPU_IPC_WOULD_BLOCK || code == GPU_IPC_OK, "a ticket of another session");
    // The producer may answer before the call returns.
    if (code == GPU_IPC_OK)
        check(gpu_ipc_received_close(early), "close");
    check(gpu_ipc_participant_abandon(first, &unused, sizeof unused), "abandon");

    uint32_t state = 0;
    check(gpu_ipc_stream_synchronize(stream), "synchronize");
    check(gpu_ipc_received_state(received, &state), "state");
    require(state == GPU_IPC_STATE_READY, "another state");
    require(gpu_ipc_received_len(received) == 4096 && gpu_ipc_received_region(received) < 1000, "another block");
    // The host backend's memory is the CPU's too, and one.
    memcpy(gpu_ipc_block_ptr(block), "hello", 5);
    require(memcmp(gpu_ipc_received_ptr(received), "hello", 5) == 0, "another memory");
    check(gpu_ipc_received_used_on(received, stream), "used on");
    check(gpu_ipc_block_used_on(block, stream), "used on");

    gpu_ipc_received *part, *forwarded;
    gpu_ipc_descriptor onward;
    char bytes[4];
    check(gpu_ipc_received_slice(received, 1, 4, &part), "slice");
    check(gpu_ipc_received_read(part, 0, bytes, 4, stream), "read");
    require(memcmp(bytes, "ello", 4) == 0, "other bytes");
    check(gpu_ipc_received_write(part, 0, "ELLO", 4, stream), "write");
    check(gpu_ipc_received_forward(part, gpu_ipc_participant_id(first), 0, -1, &onward), "forward");
    forward_with_user_bytes(part);
    check(gpu_ipc_received_close(part), "close");
    check(gpu_ipc_received_close(received), "close");
    check(gpu_ipc_received_close(without), "close");
    check(gpu_ipc_claim(first, &onward, sizeof onward, GPU_IPC_WAIT, NULL, -1, &forwarded), "claim");
    check(gpu_ipc_received_read(forwarded, 0, bytes, 4, stream), "read");
    require(memcmp(bytes, "ELLO", 4) == 0, "other bytes");
    check(gpu_ipc_received_close(forwarded), "close");
    check(gpu_ipc_block_read(block, 0, bytes, 4, stream), "read");
    require(memcmp(bytes, "hELL", 4) == 0, "other bytes");
}

static void *waits_for_the_loan(void *loan)
{
    check(gpu_ipc_loan_wait_released(loan, -1), "wait for a loan");
    return NULL;
}

static void loans(gpu_ipc_block *block)
{
    gpu_ipc_loan *loan;
    gpu_ipc_descriptor everybody, one, taken;
    gpu_ipc_received *held[4];
    bool revoked = false;
    // Leases that end late would count.
    check(gpu_ipc_block_wait_released(block, -1), "wait");
    check(gpu_ipc_lend(block, stream, &loan), "lend");
    require(gpu_ipc_block_outstanding(block) == 1, "a loan counts as one");
    check(gpu_ipc_loan_share_ticket(loan, GPU_IPC_EVERYBODY, NULL, &everybody), "broadcast");
    for (int at = 0; at < 4; ++at) {
        gpu_ipc_participant *claimer = at % 2 ? second : first;
        check(gpu_ipc_claim(claimer, &everybody, sizeof everybody, GPU_IPC_WAIT, NULL, -1, &held[at]), "claim again");
    }
    require(gpu_ipc_loan_outstanding(loan) == 4, "a lease for each claim");
    check(gpu_ipc_loan_share(loan, gpu_ipc_participant_id(first), NULL, &one), "share");
    check(gpu_ipc_session_revoke(session, &one, &revoked), "revoke");
    require(revoked, "nobody had claimed it");
    check(gpu_ipc_session_revoke(session, &one, &revoked), "revoke");
    require(!revoked, "it is taken back already");
    gpu_ipc_received *received;
    require(gpu_ipc_claim(first, &one, sizeof one, GPU_IPC_WAIT, NULL, -1, &received) == GPU_IPC_REVOKED,
            "it was taken back");
    require(gpu_ipc_loan_wait_released(loan, 0) == GPU_IPC_DEADLINE, "it is lent");
    // A wait keeps nothing of the loan: the broadcast ends at its release.
    pthread_t waiter;
    require(pthread_create(&waiter, NULL, waits_for_the_loan, loan) == 0, "no thread");
    check(gpu_ipc_loan_release(loan), "release");
    check(gpu_ipc_loan_release(loan), "release once more");
    require(gpu_ipc_loan_share(loan, gpu_ipc_participant_id(first), NULL, &taken) == GPU_IPC_INVALID,
            "the loan is released");
    require(gpu_ipc_claim(first, &everybody, sizeof everybody, GPU_IPC_WAIT, NULL, -1, &received) == GPU_IPC_REVOKED,
            "the broadcast ended with the loan");
    require(gpu_ipc_loan_wait_released(loan, 0) == GPU_IPC_DEADLINE, "it is held");
    for (int at = 0; at < 4; ++at)
        check(gpu_ipc_received_close(held[at]), "close");
    check(gpu_ipc_loan_wait_released(loan, -1), "wait");
    require(pthread_join(waiter, NULL) == 0, "no join");
    require(gpu_ipc_loan_outstanding(loan) == 0, "nobody holds it");
    check(gpu_ipc_loan_close(loan), "close");
    check(gpu_ipc_loan_close(NULL), "close");
    require(gpu_ipc_loan_release(loan) == GPU_IPC_BAD_HANDLE, "it is closed");
}

// What the reader of a block is told.
struct told {
    char path[256];
    gpu_ipc_descriptor descriptor;
};

static pid_t reader;
static int to_reader;

// Another process, started before this one uses the library: it claims what it is told, and writes where it may only
// read.
static void start_reader(void)
{
    int ends[2];
    require(pipe(ends) == 0, "no pipe");
    reader = fork();
    require(reader >= 0, "no process");
    to_reader = ends[1];
    if (reader != 0) {
        close(ends[0]);
        return;
    }
    struct told told;
    gpu_ipc_participant *participant;
    gpu_ipc_received *received;
    bool is_read_only = false;
    char copy[4];
    close(ends[1]);
    require(read(ends[0], &told, sizeof told) == sizeof told, "nothing was told");
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device");
    check(gpu_ipc_stream_create(device, &stream), "stream");
    check(gpu_ipc_connect(device, told.path, NULL, &participant), "connect");
    check(gpu_ipc_claim(participant, &told.descriptor, sizeof told.descriptor, GPU_IPC_WAIT, NULL, -1, &received), "claim");
    check(gpu_ipc_received_is_read_only(received, &is_read_only), "is read-only");
    require(is_read_only, "it may be written");
    check(gpu_ipc_received_read(received, 0, copy, 4, stream), "read");
    require(memcmp(copy, "only", 4) == 0, "other bytes");
    require(gpu_ipc_received_write(received, 0, copy, 4, stream) == GPU_IPC_INVALID, "the library writes");
    signal(SIGSEGV, SIG_DFL);
    *(volatile char *)gpu_ipc_received_ptr(received) = 'w';
    _exit(0);
}

static void is_only_read(gpu_ipc_participant *participant, const gpu_ipc_descriptor *descriptor, bool expected)
{
    gpu_ipc_received *received;
    bool is_read_only = !expected;
    check(gpu_ipc_claim(participant, descriptor, sizeof *descriptor, GPU_IPC_WAIT, NULL, -1, &received), "claim");
    check(gpu_ipc_received_is_read_only(received, &is_read_only), "is read-only");
    require(is_read_only == expected, "granted with another access");
    check(gpu_ipc_received_close(received), "close");
}

static void read_only(const char *path)
{
    struct told told = {.path = ""};
    gpu_ipc_session *own;
    gpu_ipc_participant *here;
    gpu_ipc_block *block;
    gpu_ipc_loan *loan;
    gpu_ipc_descriptor descriptor;
    const gpu_ipc_share_options options = {.size = sizeof options, .read_only = 1};
    snprintf(told.path, sizeof told.path, "%s.r", path);
    gpu_ipc_session_options where = {.size = sizeof where, .socket = told.path, .quarantine_ns = 1000};
    check(gpu_ipc_session_open(device, &where, &own), "session");
    check(gpu_ipc_connect(device, told.path, NULL, &here), "connect");
    check(gpu_ipc_alloc(own, 4096, 0, &block), "alloc");
    char *bytes = gpu_ipc_block_ptr(block);
    memcpy(bytes, "only", 4);

    check(gpu_ipc_share(block, gpu_ipc_participant_id(here), NULL, &options, &descriptor), "share");
    is_only_read(here, &descriptor, true);
    gpu_ipc_grant grant = {.block = block, .participant = gpu_ipc_participant_id(here)};
    check(gpu_ipc_share_many(own, &grant, 1, NULL, &options, &descriptor), "share many");
    is_only_read(here, &descriptor, true);
    check(gpu_ipc_lend(block, NULL, &loan), "lend");
    check(gpu_ipc_loan_share_ticket(loan, GPU_IPC_EVERYBODY, &options, &descriptor), "broadcast");
    is_only_read(here, &descriptor, true);
    is_only_read(here, &descriptor, true);
    check(gpu_ipc_loan_share(loan, gpu_ipc_participant_id(here), NULL, &descriptor), "share");
    is_only_read(here, &descriptor, false);
    check(gpu_ipc_loan_close(loan), "close");

    int status = 0;
    check(gpu_ipc_share_ticket(block, 1, NULL, &options, &told.descriptor), "ticket");
    require(write(to_reader, &told, sizeof told) == sizeof told, "it is not told");
    require(waitpid(reader, &status, 0) == reader, "no child");
    require(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "a write into what is only read did not fault");
    require(memcmp(bytes, "only", 4) == 0, "it was written");
    close(to_reader);
    check(gpu_ipc_block_close(block), "close");
    check(gpu_ipc_participant_leave(here, -1), "leave");
    check(gpu_ipc_session_shutdown(own, -1), "shutdown");
    check(gpu_ipc_session_close(own), "close");
}

static void departure(uint64_t number, uint32_t how, const char *called)
{
    gpu_ipc_notice notice;
    char name[256];
    do {
        wait_for_notice(gpu_ipc_session_fd(session));
        check(gpu_ipc_session_next_notice(session, &notice), "notice");
    } while (notice.kind != GPU_IPC_NOTICE_LEFT);
    require(notice.number == number && notice.how == how, "another departure");
    check(gpu_ipc_session_participant_name(session, number, name, sizeof name), "name");
    require(strcmp(name, called) == 0, "another name");
}

int main(int argc, char **argv)
{
    require(argc == 2, "usage: usual SOCKET");
    start_reader();
    check(gpu_ipc_device_open(0, 0, &device), "the first device");
    check(gpu_ipc_device_close(device), "close");
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device");
    devices();
    check(gpu_ipc_stream_create(device, &stream), "stream");
    uint32_t uid = 0;
    gpu_ipc_session_options options = {.size = sizeof options,
                                       .socket = argv[1],
                                       .uids = &uid,
                                       .uid_count = 1,
                                       .region_bytes = 1 << 20,
                                       .time_to_live_ns = INT64_C(100000000000),
                                       .quarantine_ns = 1000,
                                       .max_leases = 8192,
                                       .grows_in_place = 1};
    check(gpu_ipc_session_open(device, &options, &session), "session");
    gpu_ipc_connect_options named = {.size = sizeof named, .name = "first", .timeout_ns = -1, .cache_regions = 4};
    check(gpu_ipc_connect(device, argv[1], &named, &first), "connect");

    // The other one by a socket pair, which no path leads to.
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "no pair");
    check(gpu_ipc_session_accept(session, ends[0]), "accept");
    close(ends[0]);
    check(gpu_ipc_connect_by(device, ends[1], NULL, &second), "connect by");
    close(ends[1]);

    uint64_t numbers[8];
    size_t count;
    char name[256];
    check(gpu_ipc_session_participants(session, 2, INT64_C(60000000000), numbers, 8, &count), "participants");
    require(count == 2, "others are connected");
    check(gpu_ipc_session_participant_name(session, gpu_ipc_participant_id(first), name, sizeof name), "name");
    require(strcmp(name, "first") == 0, "another name");
    gpu_ipc_notice notice;
    wait_for_notice(gpu_ipc_session_fd(session));
    check(gpu_ipc_session_next_notice(session, &notice), "notice");
    require(notice.kind == GPU_IPC_NOTICE_JOINED, "another notice");

    gpu_ipc_block *block;
    check(gpu_ipc_alloc(session, 4096, 0, &block), "alloc");
    options_and_user_bytes(block);
    tickets_and_event_loops(block);
    loans(block);
    several_at_once();

    gpu_ipc_stats stats = {.size = sizeof stats};
    gpu_ipc_collected collected = {.size = sizeof collected};
    check(gpu_ipc_session_get_stats(session, &stats), "stats");
    require(stats.participants == 2 && stats.live_blocks >= 1 && stats.revoked >= 1 && stats.reserved_bytes > 0,
            "other numbers");
    check(gpu_ipc_session_collect(session, &collected), "collect");
    check(gpu_ipc_session_collect(session, NULL), "collect");
    uint64_t number = gpu_ipc_participant_id(first);
    check(gpu_ipc_participant_leave(first, -1), "leave");
    departure(number, GPU_IPC_DEPARTURE_GOODBYE, "first");
    // What is still held is named.
    require(gpu_ipc_session_shutdown(session, 0) == GPU_IPC_DEADLINE, "a block is held");
    require(strstr(gpu_ipc_last_error_text(), "by this process itself") != NULL, gpu_ipc_last_error_text());
    check(gpu_ipc_block_close(block), "close");
    check(gpu_ipc_participant_leave(second, -1), "leave");
    check(gpu_ipc_session_shutdown(session, -1), "shutdown");
    check(gpu_ipc_session_trim(session, NULL), "trim");
    check(gpu_ipc_session_close(session), "close");
    read_only(argv[1]);
    check(gpu_ipc_stream_close(stream), "close");
    check(gpu_ipc_device_close(device), "close");
    printf("usual: all went well\n");
    return 0;
}

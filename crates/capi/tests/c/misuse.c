// What a program does wrong is an error code, and nothing else happens.
//
//     misuse SOCKET [OTHER]    OTHER: a copy of the library, which this program loads a second time

#include "../../examples/common.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXPECT(code, call)                                                                                             \
    do {                                                                                                               \
        int32_t got_ = (call);                                                                                         \
        if (got_ != (code)) {                                                                                          \
            fprintf(stderr, "%s:%d: %s gives %d (%s), not %d\n", __FILE__, __LINE__, #call, (int)got_,                 \
                    gpu_ipc_last_error_text(), (int)(code));                                                           \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

// The call fails, and its text has the word.
#define SAYS(code, word, call)                                                                                         \
    do {                                                                                                               \
        EXPECT(code, call);                                                                                            \
        require(strstr(gpu_ipc_last_error_text(), word) != NULL, gpu_ipc_last_error_text());                           \
        require(gpu_ipc_last_error() == (code), "another code is kept");                                               \
        require(gpu_ipc_last_error_remedy()[0] != 0, "no remedy");                                                     \
    } while (0)

static gpu_ipc_device *device;
static gpu_ipc_stream *stream;
static gpu_ipc_session *session;
static gpu_ipc_participant *participant;
static gpu_ipc_block *block;
static gpu_ipc_received *received;
static gpu_ipc_descriptor descriptor;
static const char *socket_path;

static void open_all(const char *path)
{
    gpu_ipc_session_options options = {.size = sizeof options, .socket = path};
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device");
    check(gpu_ipc_stream_create(device, &stream), "stream");
    check(gpu_ipc_session_open(device, &options, &session), "session");
    check(gpu_ipc_connect(device, path, NULL, &participant), "connect");
    check(gpu_ipc_alloc(session, 4096, 0, &block), "alloc");
    check(gpu_ipc_share(block, gpu_ipc_participant_id(participant), NULL, NULL, &descriptor), "share");
    check(gpu_ipc_claim(participant, &descriptor, sizeof descriptor, GPU_IPC_WAIT, NULL, -1, &received), "claim");
}

// Calls every function that takes a handle with these, all of which are wrong.
static void call_all(int32_t code, gpu_ipc_device *d, gpu_ipc_stream *st, gpu_ipc_session *se, gpu_ipc_block *b,
                     gpu_ipc_participant *p, gpu_ipc_received *r, gpu_ipc_client *c, gpu_ipc_writer *w,
                     gpu_ipc_reader *re, gpu_ipc_scratch *sc, gpu_ipc_pool *po, gpu_ipc_pool_reader *pr)
{
    bool is_read_only;
    gpu_ipc_stream *made_stream = (gpu_ipc_stream *)1;
    gpu_ipc_session *made_session = (gpu_ipc_session *)1;
    gpu_ipc_participant *made_participant = (gpu_ipc_participant *)1;
    gpu_ipc_block *made_block = (gpu_ipc_block *)1;
    gpu_ipc_received *made_received = (gpu_ipc_received *)1;
    gpu_ipc_client *made_client;
    gpu_ipc_writer *made_writer;
    gpu_ipc_reader *made_reader;
    gpu_ipc_scratch *made_scratch;
    gpu_ipc_pool *made_pool = (gpu_ipc_pool *)1;
    gpu_ipc_pool_reader *made_pool_reader = (gpu_ipc_pool_reader *)1;
    gpu_ipc_pool_info pool_info = {.size = sizeof pool_info};
    gpu_ipc_key key = {{0}};
    gpu_ipc_seal seal = {.block = 1};
    gpu_ipc_sealed sealed = {.block = 1};
    gpu_ipc_region region;
    gpu_ipc_device_info device_info = {.size = sizeof device_info};
    gpu_ipc_stats stats = {.size = sizeof stats};
    gpu_ipc_collected collected = {.size = sizeof collected};
    gpu_ipc_reader_info reader_info = {.size = sizeof reader_info};
    gpu_ipc_part part = {.size = sizeof part};
    gpu_ipc_part_spec spec = {.name = "w", .type_code = 1, .type_bits = 8};
    gpu_ipc_grant grant = {.block = b};
    gpu_ipc_identity identity = {{0}};
    gpu_ipc_descriptor made;
    gpu_ipc_notice notice;
    char text[4096];
    uint64_t number;
    uint32_t state;
    size_t count;
    bool did;

    EXPECT(code, gpu_ipc_device_get_info(d, &device_info));
    EXPECT(code, gpu_ipc_stream_create(d, &made_stream));
    require(made_stream == NULL, "a handle is not null after an error");
    EXPECT(code, gpu_ipc_stream_borrow(d, NULL, NULL, NULL, &made_stream));
    EXPECT(code, gpu_ipc_stream_synchronize(st));
    EXPECT(code, gpu_ipc_session_open(d, NULL, &made_session));
    require(made_session == NULL, "a handle is not null after an error");
    EXPECT(code, gpu_ipc_session_path(se, text, sizeof text));
    EXPECT(code, gpu_ipc_alloc(se, 1, 0, &made_block));
    require(made_block == NULL, "a handle is not null after an error");
    EXPECT(code, gpu_ipc_adopt(se, text, 1, NULL, NULL, &made_block));
    EXPECT(code, gpu_ipc_session_collect(se, &collected));
    EXPECT(code, gpu_ipc_session_get_stats(se, &stats));
    EXPECT(code, gpu_ipc_session_trim(se, &number));
    EXPECT(code, gpu_ipc_session_participants(se, 0, 0, &number, 1, &count));
    EXPECT(code, gpu_ipc_session_participant_name(se, 1, text, sizeof text));
    EXPECT(code, gpu_ipc_session_accept(se, 0));
    EXPECT(code, gpu_ipc_session_next_notice(se, &notice));
    EXPECT(code, gpu_ipc_session_shutdown(se, 0));
    EXPECT(code, gpu_ipc_share_many(se, &grant, 1, NULL, NULL, &made));
    EXPECT(code, gpu_ipc_torch_use(se));
    require(gpu_ipc_session_fd(se) == -1 && gpu_ipc_last_error() == code, "a descriptor of no session");
    EXPECT(code, gpu_ipc_share(b, 1, NULL, NULL, &made));
    EXPECT(code, gpu_ipc_share_ticket(b, 1, NULL, NULL, &made));
    EXPECT(code, gpu_ipc_block_cancel(b, &descriptor, &did));
    EXPECT(code, gpu_ipc_block_used_on(b, st));
    EXPECT(code, gpu_ipc_block_wait_released(b, 0));
    EXPECT(code, gpu_ipc_block_write(b, 0, text, 1, st));
    EXPECT(code, gpu_ipc_block_read(b, 0, text, 1, st));
    require(gpu_ipc_block_ptr(b) == NULL && gpu_ipc_block_len(b) == 0, "a block that is none");
    require(gpu_ipc_block_outstanding(b) == SIZE_MAX, "leases of no block");
    EXPECT(code, gpu_ipc_connect(d, "/nowhere", NULL, &made_participant));
    require(made_participant == NULL, "a handle is not null after an error");
    EXPECT(code, gpu_ipc_connect_by(d, 0, NULL, &made_participant));
    EXPECT(code, gpu_ipc_claim(p, &descriptor, sizeof descriptor, 0, NULL, 0, &made_received));
    require(made_received == NULL, "a handle is not null after an error");
    EXPECT(code, gpu_ipc_try_claim(p, &descriptor, sizeof descriptor, 0, NULL, &made_received));
    EXPECT(code, gpu_ipc_claim_many(p, &descriptor, 1, 0, NULL, 0, &made_received, NULL));
    EXPECT(code, gpu_ipc_participant_prefetch(p, &descriptor, 1));
    EXPECT(code, gpu_ipc_participant_abandon(p, &descriptor, sizeof descriptor));
    EXPECT(code, gpu_ipc_participant_next_notice(p, &notice));
    require(gpu_ipc_participant_id(p) == 0 && gpu_ipc_participant_fd(p) == -1, "a participant that is none");
    require(gpu_ipc_received_ptr(r) == NULL && gpu_ipc_received_len(r) == 0, "a block that is none");
    require(gpu_ipc_received_region(r) == 0, "a region of no block");
    EXPECT(code, gpu_ipc_received_state(r, &state));
    EXPECT(code, gpu_ipc_received_is_read_only(r, &is_read_only));
    EXPECT(code, gpu_ipc_received_wait(r, NULL, 0));
    EXPECT(code, gpu_ipc_received_used_on(r, st));
    EXPECT(code, gpu_ipc_received_slice(r, 0, 1, &made_received));
    EXPECT(code, gpu_ipc_received_write(r, 0, text, 1, st));
    EXPECT(code, gpu_ipc_received_read(r, 0, text, 1, st));
    EXPECT(code, gpu_ipc_received_forward(r, 0, 1, 0, &made));
    EXPECT(code, gpu_ipc_client_connect(d, NULL, &made_client));
    EXPECT(code, gpu_ipc_object_create(c, "m", &spec, 1, NULL, &made_writer));
    EXPECT(code, gpu_ipc_object_open(c, "m", 0, &made_reader));
    EXPECT(code, gpu_ipc_object_open_identity(c, &identity, &made_reader));
    EXPECT(code, gpu_ipc_object_watch(c, "m", 0, 0, &number));
    EXPECT(code, gpu_ipc_object_remove(c, "m", 0, &number));
    EXPECT(code, gpu_ipc_object_outcome(c, &identity, &state, &number));
    EXPECT(code, gpu_ipc_writer_get_part(w, "w", &part));
    EXPECT(code, gpu_ipc_writer_identity(w, &identity));
    EXPECT(code, gpu_ipc_writer_write(w, "w", 0, text, 1));
    EXPECT(code, gpu_ipc_writer_used_on(w, st));
    EXPECT(code, gpu_ipc_writer_commit(w, NULL, 0, 0, &number));
    EXPECT(code, gpu_ipc_reader_get_info(re, &reader_info));
    EXPECT(code, gpu_ipc_reader_user(re, text, sizeof text));
    EXPECT(code, gpu_ipc_reader_get_part(re, "w", &part));
    EXPECT(code, gpu_ipc_reader_get_part_at(re, 0, &part));
    EXPECT(code, gpu_ipc_reader_read(re, "w", 0, text, 1));
    EXPECT(code, gpu_ipc_reader_used_on(re, st));
    EXPECT(code, gpu_ipc_reader_advance(re, 0, &did));
    EXPECT(code, gpu_ipc_reader_advance_identity(re, &identity, &did));
    EXPECT(code, gpu_ipc_reader_sleep(re, false));
    EXPECT(code, gpu_ipc_reader_wake(re));
    EXPECT(code, gpu_ipc_reader_wake_to(re, 0));
    EXPECT(code, gpu_ipc_reader_copy_part(re, "w", w));
    EXPECT(code, gpu_ipc_reader_writable_copy(re, &made_scratch));
    EXPECT(code, gpu_ipc_object_scratch(c, "m", &spec, 1, &made_scratch));
    EXPECT(code, gpu_ipc_scratch_get_part(sc, "w", &part));
    EXPECT(code, gpu_ipc_scratch_write(sc, "w", 0, text, 1));
    EXPECT(code, gpu_ipc_scratch_read(sc, "w", 0, text, 1));
    EXPECT(code, gpu_ipc_scratch_used_on(sc, st));
    EXPECT(code, gpu_ipc_pool_create(c, "m", &spec, 1, 8192, NULL, &made_pool));
    require(made_pool == NULL, "a handle is not null after an error");
    EXPECT(code, gpu_ipc_pool_adopt(c, "m", false, &made_pool));
    EXPECT(code, gpu_ipc_pool_get_info(po, &pool_info));
    EXPECT(code, gpu_ipc_pool_user(po, text, sizeof text));
    EXPECT(code, gpu_ipc_pool_get_part(po, "w", &part));
    EXPECT(code, gpu_ipc_pool_get_part_at(po, 0, &part));
    EXPECT(code, gpu_ipc_pool_regions(po, &region, 1, &count));
    EXPECT(code, gpu_ipc_pool_write(po, "w", 0, text, 1));
    EXPECT(code, gpu_ipc_pool_read(po, "w", 0, text, 1));
    EXPECT(code, gpu_ipc_pool_fill(po, "w", 0, 1, 0, st));
    EXPECT(code, gpu_ipc_pool_used_on(po, st));
    EXPECT(code, gpu_ipc_pool_invalidate(po, 0));
    EXPECT(code, gpu_ipc_pool_seal(po, 0, &key, st));
    EXPECT(code, gpu_ipc_pool_seal_many(po, &seal, 1, st));
    EXPECT(code, gpu_ipc_pool_sealed(po, &sealed, 1, &count));
    EXPECT(code, gpu_ipc_pool_open(c, "m", &made_pool_reader));
    require(made_pool_reader == NULL, "a handle is not null after an error");
    EXPECT(code, gpu_ipc_pool_reader_get_info(pr, &pool_info));
    EXPECT(code, gpu_ipc_pool_reader_user(pr, text, sizeof text));
    EXPECT(code, gpu_ipc_pool_reader_get_part(pr, "w", &part));
    EXPECT(code, gpu_ipc_pool_reader_get_part_at(pr, 0, &part));
    EXPECT(code, gpu_ipc_pool_reader_used_on(pr, st));
    EXPECT(code, gpu_ipc_pool_reader_sealed(pr, &sealed, 1, &count));
    EXPECT(code, gpu_ipc_pool_reader_look(pr, 0, &did, &sealed));
    EXPECT(code, gpu_ipc_pool_reader_is_still(pr, &sealed, &did));
    EXPECT(code, gpu_ipc_pool_reader_read_whole(pr, 0, "w", 0, text, 1, &did, &sealed));
}

// Closes what is wrong. Null is passed over, as free does.
static void close_all(int32_t code, gpu_ipc_device *d, gpu_ipc_stream *st, gpu_ipc_session *se, gpu_ipc_block *b,
                      gpu_ipc_participant *p, gpu_ipc_received *r, gpu_ipc_client *c, gpu_ipc_writer *w,
                      gpu_ipc_reader *re, gpu_ipc_scratch *sc, gpu_ipc_pool *po, gpu_ipc_pool_reader *pr)
{
    EXPECT(code, gpu_ipc_device_close(d));
    EXPECT(code, gpu_ipc_stream_close(st));
    EXPECT(code, gpu_ipc_session_close(se));
    EXPECT(code, gpu_ipc_block_close(b));
    EXPECT(code, gpu_ipc_participant_close(p));
    EXPECT(code, gpu_ipc_participant_leave(p, 0));
    EXPECT(code, gpu_ipc_received_close(r));
    EXPECT(code, gpu_ipc_received_close_many(&r, 1));
    EXPECT(code, gpu_ipc_client_close(c));
    EXPECT(code, gpu_ipc_writer_close(w));
    EXPECT(code, gpu_ipc_reader_close(re));
    EXPECT(code, gpu_ipc_scratch_close(sc));
    EXPECT(code, gpu_ipc_pool_end(po, NULL, 0));
    EXPECT(code, gpu_ipc_pool_close(po));
    EXPECT(code, gpu_ipc_pool_reader_close(pr));
}

static void null_handles(void)
{
    call_all(GPU_IPC_BAD_HANDLE, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    close_all(GPU_IPC_OK, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    SAYS(GPU_IPC_BAD_HANDLE, "a session is null", gpu_ipc_session_shutdown(NULL, 0));
}

static void null_results(void)
{
    size_t count;
    EXPECT(GPU_IPC_INVALID, gpu_ipc_device_open(GPU_IPC_HOST, 0, NULL));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_detect(NULL, 1, &count));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_detect(NULL, 0, NULL));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_alloc(session, 1, 0, NULL));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_session_get_stats(session, NULL));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_share(block, 1, NULL, NULL, NULL));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_share_many(session, NULL, 1, NULL, NULL, NULL));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_claim(participant, NULL, 192, 0, NULL, 0, &received));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_claim_many(participant, &descriptor, 1, 0, NULL, 0, NULL, NULL));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_connect(device, NULL, NULL, &participant));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_block_write(block, 0, NULL, 1, stream));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_session_path(session, NULL, 0));
    EXPECT(GPU_IPC_INVALID, gpu_ipc_block_cancel(block, NULL, NULL));
    // What a failed call made null is not what these were.
    received = NULL;
    participant = NULL;
}

static void wrong_numbers(void)
{
    char text[1];
    gpu_ipc_stream *made;
    gpu_ipc_received *part;
    gpu_ipc_stats stats = {.size = 0};
    gpu_ipc_connect_options options = {.size = sizeof options, .read_only = 7};
    SAYS(GPU_IPC_INVALID, "the vendor is 99", gpu_ipc_device_open(99, 0, &device));
    require(device == NULL, "a handle is not null after an error");
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device");
    gpu_ipc_device *other;
    SAYS(GPU_IPC_INVALID, "the number of a device", gpu_ipc_device_open(GPU_IPC_HOST, 1u << 30, &other));
    SAYS(GPU_IPC_INVALID, "the size of a structure", gpu_ipc_session_get_stats(session, &stats));
    SAYS(GPU_IPC_INVALID, "read_only is 7", gpu_ipc_connect(device, socket_path, &options, &(gpu_ipc_participant *){NULL}));
    gpu_ipc_share_options share = {.size = sizeof share, .read_only = 7};
    SAYS(GPU_IPC_INVALID, "read_only is 7", gpu_ipc_share(block, 7, NULL, &share, &(gpu_ipc_descriptor){{0}}));
    share = (gpu_ipc_share_options){.size = sizeof share, .reserved = 1};
    SAYS(GPU_IPC_UNSUPPORTED, "its field `reserved` is not zero", gpu_ipc_share(block, 7, NULL, &share, &(gpu_ipc_descriptor){{0}}));
    SAYS(GPU_IPC_INVALID, "the length of a block", gpu_ipc_alloc(session, 0, 0, &(gpu_ipc_block *){NULL}));
    SAYS(GPU_IPC_INVALID, "capacity for a text", gpu_ipc_session_path(session, text, sizeof text));
    SAYS(GPU_IPC_INVALID, "the way to wait", gpu_ipc_claim(participant, &descriptor, sizeof descriptor, 9, NULL, 0, &part));
    SAYS(GPU_IPC_BAD_DESCRIPTOR, "not a descriptor", gpu_ipc_claim(participant, "text", 4, 0, NULL, 0, &part));
    SAYS(GPU_IPC_CONNECT, "cannot connect", gpu_ipc_connect(device, "/nowhere/s", NULL, &(gpu_ipc_participant *){NULL}));
    EXPECT(GPU_IPC_PARTICIPANT_GONE, gpu_ipc_share(block, 7, NULL, NULL, &(gpu_ipc_descriptor){{0}}));
    // Another stream on every thread cannot be named for later.
    check(gpu_ipc_stream_borrow(device, (void *)2, NULL, NULL, &made), "borrow");
    SAYS(GPU_IPC_INVALID, "another stream on every thread", gpu_ipc_block_used_on(block, made));
    check(gpu_ipc_stream_close(made), "close");
    void (*none)(void *) = NULL;
    SAYS(GPU_IPC_INVALID, "returned is null", gpu_ipc_adopt(session, text, 1, none, NULL, &(gpu_ipc_block *){NULL}));
    SAYS(GPU_IPC_UNSUPPORTED, "PyTorch", gpu_ipc_torch_use(session));
    require(gpu_ipc_torch_alloc(4096, 0, NULL) == NULL, "a segment of no session");
    gpu_ipc_torch_free(text, 1, 0, NULL);
    require(strcmp(gpu_ipc_error_name(GPU_IPC_STALE), "stale") == 0, "another name");
    require(strcmp(gpu_ipc_error_name(-5), "unknown") == 0, "a name of no code");
}

static void handles_of_another_kind(void)
{
    void *wrong = block;
    SAYS(GPU_IPC_BAD_HANDLE, "of a block", gpu_ipc_session_shutdown((gpu_ipc_session *)wrong, 0));
    SAYS(GPU_IPC_BAD_HANDLE, "of a block", gpu_ipc_received_close((gpu_ipc_received *)wrong));
    int on_the_stack = 0;
    wrong = &on_the_stack;
    EXPECT(GPU_IPC_BAD_HANDLE, gpu_ipc_stream_close((gpu_ipc_stream *)wrong));
    for (uintptr_t bits = 1; bits != 0; bits <<= 1) {
        EXPECT(GPU_IPC_BAD_HANDLE, gpu_ipc_device_close((gpu_ipc_device *)bits));
    }
}

static void *wait_for_ever(void *of)
{
    // Until the lease is ended by the main thread, which closes the block's handle meanwhile.
    int32_t code = gpu_ipc_block_wait_released(of, -1);
    return (void *)(intptr_t)code;
}

static void handles_after_their_close(void)
{
    gpu_ipc_session *closed_session = session;
    gpu_ipc_block *closed_block = block;
    gpu_ipc_received *closed_received = received;
    pthread_t waiting;
    require(pthread_create(&waiting, NULL, wait_for_ever, block) == 0, "no thread");
    check(gpu_ipc_block_close(block), "close");
    check(gpu_ipc_received_close(received), "close");
    void *code;
    pthread_join(waiting, &code);
    // The thread was in its call before the close, or came after it.
    require(code == NULL || (intptr_t)code == GPU_IPC_BAD_HANDLE, "another code of a close during a call");
    SAYS(GPU_IPC_BAD_HANDLE, "a block was closed", gpu_ipc_block_close(closed_block));
    SAYS(GPU_IPC_BAD_HANDLE, "a received block was closed", gpu_ipc_received_close(closed_received));
    // Another block may get the same row, but never the same handle.
    for (int round = 0; round < 1000; ++round) {
        gpu_ipc_block *another;
        check(gpu_ipc_alloc(session, 256, 0, &another), "alloc");
        require(another != closed_block, "a handle is used again");
        EXPECT(GPU_IPC_BAD_HANDLE, gpu_ipc_block_close(closed_block));
        check(gpu_ipc_block_close(another), "close");
    }
    check(gpu_ipc_session_close(session), "close");
    check(gpu_ipc_participant_close(participant), "close");
    check(gpu_ipc_stream_close(stream), "close");
    check(gpu_ipc_device_close(device), "close");
    // None of them can stand for anything again.
    call_all(GPU_IPC_BAD_HANDLE, device, stream, closed_session, closed_block, participant, closed_received, NULL, NULL,
             NULL, NULL, NULL, NULL);
}

static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t told_changed = PTHREAD_COND_INITIALIZER;
static int told;

static void stream_is_released(void *context)
{
    // Any function may be called here.
    gpu_ipc_stream *made;
    check(gpu_ipc_stream_create(device, &made), "stream in a callback");
    check(gpu_ipc_stream_close(made), "close in a callback");
    EXPECT(GPU_IPC_BAD_HANDLE, gpu_ipc_stream_close(context));
    pthread_mutex_lock(&told_lock);
    ++told;
    pthread_cond_signal(&told_changed);
    pthread_mutex_unlock(&told_lock);
}

static void callbacks_that_call_back(void)
{
    gpu_ipc_stream *borrowed;
    // A null handle is the default stream of the device, which lives for ever.
    check(gpu_ipc_stream_borrow(device, NULL, stream_is_released, (void *)block, &borrowed), "borrow");
    check(gpu_ipc_block_used_on(block, borrowed), "used on");
    check(gpu_ipc_stream_close(borrowed), "close");
    gpu_ipc_block *keeps = block;
    check(gpu_ipc_alloc(session, 4096, 0, &block), "alloc");
    check(gpu_ipc_received_close(received), "close");
    check(gpu_ipc_block_close(keeps), "close");
    pthread_mutex_lock(&told_lock);
    while (told == 0) {
        pthread_cond_wait(&told_changed, &told_lock);
    }
    require(told == 1, "it was told twice");
    pthread_mutex_unlock(&told_lock);
    check(gpu_ipc_share(block, gpu_ipc_participant_id(participant), NULL, NULL, &descriptor), "share");
    check(gpu_ipc_claim(participant, &descriptor, sizeof descriptor, GPU_IPC_WAIT, NULL, -1, &received), "claim");
}

static void calls_in_a_forked_child(void)
{
    pid_t child = fork();
    require(child >= 0, "no child");
    if (child == 0) {
        call_all(GPU_IPC_FORKED, device, stream, session, block, participant, received, (gpu_ipc_client *)(void *)block,
                 (gpu_ipc_writer *)(void *)block, (gpu_ipc_reader *)(void *)block, (gpu_ipc_scratch *)(void *)block,
                 (gpu_ipc_pool *)(void *)block, (gpu_ipc_pool_reader *)(void *)block);
        close_all(GPU_IPC_FORKED, device, stream, session, block, participant, received,
                  (gpu_ipc_client *)(void *)block, (gpu_ipc_writer *)(void *)block, (gpu_ipc_reader *)(void *)block,
                  (gpu_ipc_scratch *)(void *)block, (gpu_ipc_pool *)(void *)block,
                  (gpu_ipc_pool_reader *)(void *)block);
        // The child opens its own.
        char path[4096];
        require((size_t)snprintf(path, sizeof path, "%s-child", socket_path) < sizeof path, "too long a path");
        open_all(path);
        check(gpu_ipc_received_close(received), "close");
        check(gpu_ipc_block_close(block), "close");
        check(gpu_ipc_participant_leave(participant, -1), "leave");
        check(gpu_ipc_session_shutdown(session, -1), "shutdown");
        _exit(0);
    }
    int status = 0;
    require(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child failed");
    // Nothing of the parent's has changed.
    uint32_t state = 0;
    check(gpu_ipc_received_state(received, &state), "state");
    require(state == GPU_IPC_STATE_READY, "another state after a fork");
}

static void two_libraries(const char *other)
{
    void *library = dlopen(other, RTLD_NOW | RTLD_LOCAL);
    require(library != NULL, dlerror());
    int32_t (*close_there)(gpu_ipc_session *);
    int32_t (*open_there)(uint32_t, uint32_t, gpu_ipc_device **);
    const char *(*text_there)(void);
    *(void **)&close_there = dlsym(library, "gpu_ipc_session_close");
    *(void **)&open_there = dlsym(library, "gpu_ipc_device_open");
    *(void **)&text_there = dlsym(library, "gpu_ipc_last_error_text");
    require(close_there != gpu_ipc_session_close, "it is the same library");
    gpu_ipc_device *theirs;
    require(open_there(GPU_IPC_HOST, 0, &theirs) == GPU_IPC_OK, text_there());
    if ((uintptr_t)theirs >> 54 == (uintptr_t)device >> 54) {
        // Of 1,023 pairs of libraries one has drawn the same number, as the header says.
        return;
    }
    require(close_there(session) == GPU_IPC_BAD_HANDLE, "a handle of this library is taken by another");
    require(strstr(text_there(), "no handle of this library") != NULL, text_there());
    SAYS(GPU_IPC_BAD_HANDLE, "no handle of this library", gpu_ipc_device_close(theirs));
}

static void a_log(void)
{
    int ends[2];
    require(pipe(ends) == 0, "no pipe");
    EXPECT(GPU_IPC_INVALID, gpu_ipc_log_to(ends[1], 99));
    check(gpu_ipc_log_to(ends[1], GPU_IPC_LOG_DEBUG), "log");
    char path[4096], line[4096];
    require((size_t)snprintf(path, sizeof path, "%s-log", socket_path) < sizeof path, "too long a path");
    gpu_ipc_session_options options = {.size = sizeof options, .socket = path};
    gpu_ipc_session *logged;
    check(gpu_ipc_session_open(device, &options, &logged), "session");
    ssize_t len = read(ends[0], line, sizeof line - 1);
    require(len > 0, "no line");
    line[len] = 0;
    require(strncmp(line, "gpu_ipc DEBUG: ", 15) == 0 && strchr(line, '\n') != NULL, line);
    check(gpu_ipc_log_to(-1, GPU_IPC_LOG_WARN), "log");
    check(gpu_ipc_session_close(logged), "close");
    close(ends[0]);
    close(ends[1]);
}

int main(int argc, char **argv)
{
    require(argc >= 2, "usage: misuse SOCKET [OTHER]");
    socket_path = argv[1];
    null_handles();
    open_all(argv[1]);
    gpu_ipc_received *kept = received;
    gpu_ipc_participant *member = participant;
    null_results();
    received = kept;
    participant = member;
    wrong_numbers();
    participant = member;
    handles_of_another_kind();
    callbacks_that_call_back();
    calls_in_a_forked_child();
    a_log();
    if (argc > 2) {
        two_libraries(argv[2]);
    }
    handles_after_their_close();
    printf("misuse: every call gave its code\n");
    return 0;
}

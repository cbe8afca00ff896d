// Pools: held, killed and adopted, sealed in stream order, read beside their holder.
//
//     pools DIR      with a broker in DIR

#include "../../examples/common.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCKS = 16, BLOCK = 4096 };

static gpu_ipc_device *device;
static gpu_ipc_client *client;
static gpu_ipc_stream *stream;
static unsigned char bytes[BLOCK];

static void connect_to(const char *dir, const char *name)
{
    gpu_ipc_client_options options = {.size = sizeof options, .dir = dir, .name = name};
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device");
    check(gpu_ipc_client_connect(device, &options, &client), "broker");
    check(gpu_ipc_stream_create(device, &stream), "stream");
}

static void fails(int32_t code, int32_t got, const char *word)
{
    if (code != got || strstr(gpu_ipc_last_error_text(), word) == NULL) {
        fprintf(stderr, "code %d for %d, or without `%s`: %s\n", got, code, word, gpu_ipc_last_error_text());
        exit(1);
    }
}

static int32_t create(const char *name, const gpu_ipc_create_options *options, gpu_ipc_pool **pool)
{
    static const uint64_t kv[] = {BLOCKS, BLOCK}, state[] = {3};
    const gpu_ipc_part_spec parts[] = {
        {.name = "kv", .shape = kv, .rank = 2, .type_code = 1, .type_bits = 8},
        {.name = "state", .shape = state, .rank = 1, .type_code = 1, .type_bits = 32},
    };
    return gpu_ipc_pool_create(client, name, parts, 2, gpu_ipc_journal_bytes(BLOCKS), options, pool);
}

static gpu_ipc_key key(unsigned char fill)
{
    gpu_ipc_key made;
    memset(made.bytes, fill, sizeof made.bytes);
    return made;
}

// Fills a block by work on the stream; what is not sealed here is left open.
static void fill(gpu_ipc_pool *pool, uint32_t block, unsigned char value, bool sealed)
{
    gpu_ipc_key called = key(value);
    check(gpu_ipc_pool_invalidate(pool, block), "invalidate");
    check(gpu_ipc_pool_fill(pool, "kv", (uint64_t)block * BLOCK, sealed ? BLOCK : BLOCK / 2, value, stream), "fill");
    if (sealed) {
        check(gpu_ipc_pool_seal(pool, block, &called, stream), "seal");
    }
}

// Looks at every byte of every block that is listed, and returns the set of their numbers.
static uint32_t listed(gpu_ipc_pool *pool)
{
    gpu_ipc_sealed sealed[BLOCKS];
    size_t count = 0;
    uint32_t set = 0;
    check(gpu_ipc_pool_sealed(pool, sealed, BLOCKS, &count), "sealed");
    for (size_t at = 0; at < count; ++at) {
        check(gpu_ipc_pool_read(pool, "kv", (uint64_t)sealed[at].block * BLOCK, bytes, BLOCK), "read");
        for (size_t byte = 0; byte < BLOCK; ++byte) {
            require(bytes[byte] == sealed[at].key.bytes[0], "a block is listed and not whole");
        }
        set |= UINT32_C(1) << sealed[at].block;
    }
    return set;
}

static gpu_ipc_pool_info info_of(gpu_ipc_pool *pool)
{
    gpu_ipc_pool_info info = {.size = sizeof info};
    check(gpu_ipc_pool_get_info(pool, &info), "info");
    return info;
}

static void the_next_holder_finds_what_was_sealed(void)
{
    const uint32_t groups[] = {0, 1};
    gpu_ipc_create_options options = {.size = sizeof options, .user = "user", .user_len = 4, .groups = groups};
    gpu_ipc_pool *pool, *other;
    check(create("kv", &options, &pool), "create");
    gpu_ipc_pool_info info = info_of(pool), again;
    require(info.generation == 1 && info.previous == GPU_IPC_PREVIOUS_NEVER && info.part_count == 2, "another pool");
    require(info.blocks >= BLOCKS && info.user_len == 4 && strcmp(info.name, "kv") == 0, "another pool");
    check(gpu_ipc_pool_user(pool, bytes, sizeof bytes), "user");
    require(memcmp(bytes, "user", 4) == 0, "other bytes of the user's");

    // Every part lies in a region, each group in its own.
    gpu_ipc_region regions[4];
    size_t count = 0;
    check(gpu_ipc_pool_regions(pool, regions, 4, &count), "regions");
    require(count == 2, "another number of regions");
    gpu_ipc_part part = {.size = sizeof part}, by_name = {.size = sizeof by_name};
    for (size_t number = 0; number < 2; ++number) {
        check(gpu_ipc_pool_get_part_at(pool, number, &part), "part");
        check(gpu_ipc_pool_get_part(pool, part.name, &by_name), "part");
        require(part.ptr == by_name.ptr && part.ptr == regions[number].ptr, "a part elsewhere");
        require(part.len <= regions[number].len, "a part beyond its region");
    }
    check(gpu_ipc_pool_regions(pool, NULL, 0, &count), "regions");
    require(count == 2, "another number of regions");

    const uint32_t table[] = {1, 2, 3};
    uint32_t found[3];
    check(gpu_ipc_pool_write(pool, "state", 0, table, sizeof table), "write");
    for (uint32_t block = 0; block < 5; ++block) {
        fill(pool, block, (unsigned char)(block + 1), true);
    }
    gpu_ipc_seal seals[] = {{.block = 7, .key = key(8)}, {.block = 6, .key = key(7)}};
    for (size_t at = 0; at < 2; ++at) {
        check(gpu_ipc_pool_invalidate(pool, seals[at].block), "invalidate");
        check(gpu_ipc_pool_fill(pool, "kv", (uint64_t)seals[at].block * BLOCK, BLOCK, seals[at].key.bytes[0], stream), "fill");
    }
    check(gpu_ipc_pool_seal_many(pool, seals, 2, stream), "seal");
    check(gpu_ipc_pool_seal_many(pool, NULL, 0, stream), "seal");
    check(gpu_ipc_pool_invalidate(pool, 2), "invalidate");
    check(gpu_ipc_pool_used_on(pool, stream), "used on");
    fails(GPU_IPC_REFUSED, gpu_ipc_pool_adopt(client, "kv", false, &other), "is held by");
    require(other == NULL, "a handle of a call that failed");
    check(gpu_ipc_pool_get_part(pool, "kv", &part), "part");
    check(gpu_ipc_pool_end(pool, &stream, 1), "end");
    fails(GPU_IPC_BAD_HANDLE, gpu_ipc_pool_invalidate(pool, 0), "a pool was closed");
    check(gpu_ipc_pool_end(NULL, NULL, 0), "end");

    // Another thread of this process may have taken the addresses meanwhile.
    bool is_elsewhere = gpu_ipc_pool_adopt(client, "kv", true, &pool) != GPU_IPC_OK;
    if (is_elsewhere) {
        require(strstr(gpu_ipc_last_error_text(), "must be free in this process") != NULL, gpu_ipc_last_error_text());
        check(gpu_ipc_pool_adopt(client, "kv", false, &pool), "adopt");
    }
    again = info_of(pool);
    require(again.generation == 2 && again.previous == GPU_IPC_PREVIOUS_CLOSED, "another hold before");
    require(memcmp(&again.identity, &info.identity, sizeof again.identity) == 0, "another identity");
    check(gpu_ipc_pool_get_part(pool, "kv", &by_name), "part");
    require(is_elsewhere || by_name.ptr == part.ptr, "other addresses");
    require(listed(pool) == (1 | 2 | 8 | 16 | 64 | 128), "other blocks are whole");
    check(gpu_ipc_pool_read(pool, "state", 0, found, sizeof found), "read");
    require(memcmp(table, found, sizeof found) == 0, "other contents");
    check(gpu_ipc_pool_close(pool), "close");
}

static void adopt(gpu_ipc_pool **pool)
{
    // Until the end of the hold before is proven, and its last work can have ended.
    int32_t code;
    while ((code = gpu_ipc_pool_adopt(client, "kv", false, pool)) == GPU_IPC_REFUSED) {
        const char *why = gpu_ipc_last_error_text();
        require(strstr(why, "is held by") != NULL || strstr(why, "its GPU work may go on") != NULL, why);
    }
    check(code, "adopt");
}

// Holds the pool, until it is killed with one block half filled and one filled and not sealed.
static void be_killed(const char *dir)
{
    gpu_ipc_pool *pool;
    connect_to(dir, "the holder");
    adopt(&pool);
    fill(pool, 1, 200, true);
    check(gpu_ipc_stream_synchronize(stream), "synchronize");
    fill(pool, 3, 99, false);
    fill(pool, 9, 10, true);
    check(gpu_ipc_pool_invalidate(pool, 9), "invalidate");
    check(gpu_ipc_stream_synchronize(stream), "synchronize");
    raise(SIGKILL);
}

static void a_killed_holders_blocks_are_whole_or_not_listed(pid_t holder)
{
    int status = 0;
    gpu_ipc_pool *pool;
    require(waitpid(holder, &status, 0) == holder && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL, "it was not killed");
    adopt(&pool);
    require(info_of(pool).previous == GPU_IPC_PREVIOUS_DIED, "another end of the hold before");
    require(listed(pool) == (1 | 2 | 16 | 64 | 128), "other blocks are whole");
    check(gpu_ipc_pool_end(pool, NULL, 0), "end");
}

static void a_reader_knows_what_it_copied(void)
{
    gpu_ipc_create_options options = {.size = sizeof options, .user = "user", .user_len = 4, .readers = GPU_IPC_READERS_EVERYBODY};
    gpu_ipc_pool *pool;
    gpu_ipc_pool_reader *reader;
    gpu_ipc_sealed found, all[BLOCKS];
    size_t count = 0;
    bool whole = false;
    uint64_t generation = 0;
    check(create("read", &options, &pool), "create");
    fill(pool, 3, 5, true);
    check(gpu_ipc_stream_synchronize(stream), "synchronize");
    check(gpu_ipc_pool_open(client, "read", &reader), "open");
    gpu_ipc_pool_info info = {.size = sizeof info};
    check(gpu_ipc_pool_reader_get_info(reader, &info), "info");
    require(info.generation == 1 && info.previous == 0 && strcmp(info.name, "read") == 0, "another pool");
    check(gpu_ipc_pool_reader_user(reader, bytes, 2), "user");
    require(memcmp(bytes, "us", 2) == 0, "other bytes of the user's");
    gpu_ipc_part part = {.size = sizeof part}, at = {.size = sizeof at};
    check(gpu_ipc_pool_reader_get_part(reader, "kv", &part), "part");
    check(gpu_ipc_pool_reader_get_part_at(reader, 0, &at), "part");
    require(part.ptr == at.ptr && ((unsigned char *)part.ptr)[3 * BLOCK] == 5, "other contents");
    check(gpu_ipc_pool_reader_used_on(reader, stream), "used on");

    check(gpu_ipc_pool_reader_sealed(reader, all, BLOCKS, &count), "sealed");
    require(count == 1 && all[0].block == 3 && all[0].generation == 1, "other blocks are whole");
    check(gpu_ipc_pool_reader_look(reader, 3, &whole, &found), "look");
    require(whole && found.block == 3 && found.key.bytes[15] == 5, "another block");
    check(gpu_ipc_pool_reader_look(reader, 4, &whole, &found), "look");
    require(!whole && found.block == 3, "a block that was never filled");
    check(gpu_ipc_pool_reader_is_still(reader, &found, &whole), "still");
    require(whole, "nothing has changed");
    check(gpu_ipc_pool_reader_read_whole(reader, 3, "kv", 3 * BLOCK, bytes, BLOCK, &whole, &found), "read");
    require(whole && bytes[0] == 5 && bytes[BLOCK - 1] == 5, "other contents");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_reader_read_whole(reader, 3, "kv", BLOCKS * BLOCK, bytes, 1, &whole, &found), "kv");
    fill(pool, 3, 6, false);
    check(gpu_ipc_pool_reader_is_still(reader, &found, &whole), "still");
    require(!whole, "it was given up");
    check(gpu_ipc_pool_reader_read_whole(reader, 3, "kv", 3 * BLOCK, bytes, BLOCK, &whole, &found), "read");
    require(!whole, "it is half filled");

    fails(GPU_IPC_DEADLINE, gpu_ipc_object_watch(client, "read", info.generation, 0, &generation), "");
    check(gpu_ipc_pool_end(pool, NULL, 0), "end");
    check(gpu_ipc_pool_adopt(client, "read", false, &pool), "adopt");
    check(gpu_ipc_object_watch(client, "read", info.generation, -1, &generation), "watch");
    require(generation == 2, "another generation");
    check(gpu_ipc_pool_close(pool), "close");
    check(gpu_ipc_pool_reader_close(reader), "close");
}

static void bad_input_is_refused_by_name(void)
{
    gpu_ipc_create_options wrong = {.size = sizeof wrong, .expect = 1};
    gpu_ipc_pool *pool;
    gpu_ipc_pool_reader *reader;
    gpu_ipc_sealed found;
    bool whole;
    size_t count;
    fails(GPU_IPC_INVALID, create("wrong", &wrong, &pool), "`expect`");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_create(client, "wrong", NULL, 0, 8192, NULL, &pool), "1 to 15");
    wrong = (gpu_ipc_create_options){.size = sizeof wrong, .readers = 77};
    fails(GPU_IPC_INVALID, create("wrong", &wrong, &pool), "GPU_IPC_READERS");
    const gpu_ipc_part_spec scalar = {.name = "a", .type_code = 1, .type_bits = 8};
    fails(GPU_IPC_INVALID, gpu_ipc_pool_create(client, "wrong", &scalar, 1, 4096, NULL, &pool), "multiple of 4,096");
    fails(GPU_IPC_NOT_FOUND, gpu_ipc_pool_adopt(client, "none", false, &pool), "none is not there");
    fails(GPU_IPC_NOT_FOUND, gpu_ipc_pool_open(client, "none", &reader), "none is not there");
    gpu_ipc_pool *second;
    check(create("right", NULL, &pool), "create");
    fails(GPU_IPC_REFUSED, create("right", NULL, &second), "right is a pool already");
    gpu_ipc_key called = key(1);
    gpu_ipc_seal twice[] = {{.block = 0, .key = called}, {.block = 0, .key = called}};
    fails(GPU_IPC_INVALID, gpu_ipc_pool_invalidate(pool, info_of(pool).blocks), "longer journal");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_seal(pool, 0, &called, stream), "not invalidated");
    fails(GPU_IPC_BAD_HANDLE, gpu_ipc_pool_seal(pool, 0, &called, NULL), "a stream is null");
    check(gpu_ipc_pool_invalidate(pool, 0), "invalidate");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_seal(pool, 0, NULL, stream), "key");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_seal_many(pool, twice, 2, stream), "block 0 twice");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_seal_many(pool, NULL, 2, stream), "seals");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_sealed(pool, NULL, 2, &count), "the room for a list");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_sealed(pool, NULL, 0, NULL), "count");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_fill(pool, "none", 0, 1, 0, stream), "no such part");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_write(pool, "kv", BLOCKS * BLOCK, bytes, 1), "kv");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_read(pool, "kv", BLOCKS * BLOCK, bytes, 1), "kv");
    check(gpu_ipc_pool_open(client, "kv", &reader), "open");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_reader_is_still(reader, NULL, &whole), "sealed");
    fails(GPU_IPC_INVALID, gpu_ipc_pool_reader_look(reader, 0, NULL, &found), "whole");
    check(gpu_ipc_pool_reader_close(reader), "close");
    check(gpu_ipc_pool_end(pool, NULL, 0), "end");
}

int main(int argc, char **argv)
{
    require(argc == 2, "usage: pools DIR");
    // Before this process has threads; it waits for the pool.
    int go[2];
    require(pipe(go) == 0, "no pipe");
    pid_t holder = fork();
    require(holder >= 0, "no child");
    if (holder == 0) {
        char one;
        close(go[1]);
        require(read(go[0], &one, 1) == 1, "the parent has ended");
        be_killed(argv[1]);
        _exit(1);
    }
    connect_to(argv[1], "pools");
    the_next_holder_finds_what_was_sealed();
    require(write(go[1], "", 1) == 1, "no child");
    a_killed_holders_blocks_are_whole_or_not_listed(holder);
    a_reader_knows_what_it_copied();
    bad_input_is_refused_by_name();
    check(gpu_ipc_stream_close(stream), "close");
    check(gpu_ipc_client_close(client), "close");
    check(gpu_ipc_device_close(device), "close");
    puts("pools: all went well");
    return 0;
}

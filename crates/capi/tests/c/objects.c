// Objects: parts that the next epoch takes over, a part that is copied, and a copy that may be written to.
//
//     objects DIR      with a broker in DIR

#include "../../examples/common.h"

enum { BASE = 1 << 20, ADAPTER = 9000 };

static gpu_ipc_client *client;
static unsigned char bytes[BASE];

// Two parts, each in a group of its own; the second one changes with every epoch.
static int32_t create(const char *name, gpu_ipc_create_options options, gpu_ipc_writer **writer)
{
    static const uint64_t base[] = {BASE}, adapter[] = {ADAPTER};
    static const uint32_t groups[] = {3, 7};
    const gpu_ipc_part_spec parts[] = {
        {.name = "base", .shape = base, .rank = 1, .type_code = 1, .type_bits = 8},
        {.name = "adapter", .shape = adapter, .rank = 1, .type_code = 1, .type_bits = 8},
    };
    options.size = sizeof options;
    options.groups = groups;
    return gpu_ipc_object_create(client, name, parts, 2, &options, writer);
}

static void fill(gpu_ipc_writer *writer, const char *part, unsigned char value, size_t len)
{
    memset(bytes, value, len);
    check(gpu_ipc_writer_write(writer, part, 0, bytes, len), "write");
}

static uint64_t commit(gpu_ipc_writer *writer)
{
    uint64_t epoch = 0;
    check(gpu_ipc_writer_commit(writer, NULL, 0, -1, &epoch), "commit");
    return epoch;
}

static void only(unsigned char value, size_t len)
{
    for (size_t at = 0; at < len; ++at) {
        require(bytes[at] == value, "other contents");
    }
}

static void holds(gpu_ipc_reader *reader, const char *part, unsigned char value, size_t len)
{
    memset(bytes, 0, len);
    check(gpu_ipc_reader_read(reader, part, 0, bytes, len), "read");
    only(value, len);
}

static void fails(int32_t code, int32_t got, const char *word)
{
    if (code != got || strstr(gpu_ipc_last_error_text(), word) == NULL) {
        fprintf(stderr, "code %d for %d, or without `%s`: %s\n", got, code, word, gpu_ipc_last_error_text());
        exit(1);
    }
}

static void parts_are_taken_over(void)
{
    const char *base = "base", *none = "none";
    gpu_ipc_create_options usual = {.size = 0}, later = {.unchanged = &base, .unchanged_count = 1};
    gpu_ipc_writer *writer;
    fails(GPU_IPC_NOT_FOUND, create("weights", later, &writer), "no epoch to take parts over from");
    require(writer == NULL, "a handle of a call that failed");
    check(create("weights", usual, &writer), "create");
    fill(writer, "base", 1, BASE);
    fill(writer, "adapter", 1, ADAPTER);
    require(commit(writer) == 1, "another epoch");
    gpu_ipc_reader *reader;
    check(gpu_ipc_object_open(client, "weights", 0, &reader), "open");

    check(create("weights", later, &writer), "create");
    fails(GPU_IPC_INVALID, gpu_ipc_writer_write(writer, "base", 0, bytes, 1), "taken over");
    fill(writer, "adapter", 2, ADAPTER);
    require(commit(writer) == 2, "another epoch");
    bool moved = false;
    check(gpu_ipc_reader_advance(reader, 0, &moved), "advance");
    require(moved, "there was a newer one");
    holds(reader, "base", 1, BASE);
    holds(reader, "adapter", 2, ADAPTER);

    gpu_ipc_create_options wrong = {.unchanged = &none, .unchanged_count = 1};
    fails(GPU_IPC_INVALID, create("weights", wrong, &writer), "none, which the layout does not have");
    wrong.unchanged = NULL;
    fails(GPU_IPC_INVALID, create("weights", wrong, &writer), "unchanged");
    check(gpu_ipc_reader_close(reader), "close");
}

static void a_part_is_copied(void)
{
    gpu_ipc_create_options usual = {.size = 0};
    gpu_ipc_reader *reader, *other;
    gpu_ipc_writer *writer;
    check(gpu_ipc_object_open(client, "weights", 0, &reader), "open");
    check(create("other", usual, &writer), "create");
    check(gpu_ipc_reader_copy_part(reader, "base", writer), "copy");
    check(gpu_ipc_reader_copy_part(reader, "adapter", writer), "copy");
    fails(GPU_IPC_INVALID, gpu_ipc_reader_copy_part(reader, "none", writer), "none, which weights does not have");
    require(commit(writer) == 1, "another epoch");
    fails(GPU_IPC_BAD_HANDLE, gpu_ipc_reader_copy_part(reader, "base", writer), "");
    check(gpu_ipc_object_open(client, "other", 0, &other), "open");
    holds(other, "base", 1, BASE);
    holds(other, "adapter", 2, ADAPTER);
    check(gpu_ipc_reader_close(other), "close");
    check(gpu_ipc_reader_close(reader), "close");
}

static void a_copy_may_be_written_to(gpu_ipc_device *device)
{
    gpu_ipc_reader *reader;
    gpu_ipc_scratch *copy, *fresh;
    gpu_ipc_stream *stream;
    gpu_ipc_part part = {.size = sizeof part}, original = {.size = sizeof original};
    check(gpu_ipc_stream_create(device, &stream), "stream");
    check(gpu_ipc_object_open(client, "weights", 0, &reader), "open");
    check(gpu_ipc_reader_writable_copy(reader, &copy), "copy");
    check(gpu_ipc_scratch_get_part(copy, "base", &part), "part");
    check(gpu_ipc_reader_get_part(reader, "base", &original), "part");
    require(part.len == BASE && part.ptr != original.ptr, "the copy is the object");
    check(gpu_ipc_scratch_used_on(copy, stream), "used on");
    memset(bytes, 9, BASE);
    check(gpu_ipc_scratch_write(copy, "base", 0, bytes, BASE / 2), "write");
    memset(bytes, 0, BASE);
    check(gpu_ipc_scratch_read(copy, "base", BASE / 2, bytes, BASE / 2), "read");
    only(1, BASE / 2);
    check(gpu_ipc_scratch_read(copy, "base", 0, bytes, BASE / 2), "read");
    only(9, BASE / 2);
    fails(GPU_IPC_INVALID, gpu_ipc_scratch_read(copy, "base", BASE, bytes, 1), "base");
    holds(reader, "base", 1, BASE);
    check(gpu_ipc_reader_sleep(reader, false), "sleep");
    fails(GPU_IPC_ASLEEP, gpu_ipc_reader_writable_copy(reader, &fresh), "weights");
    require(fresh == NULL, "a handle of a call that failed");
    check(gpu_ipc_reader_close(reader), "close");
    check(gpu_ipc_scratch_close(copy), "close");

    const uint64_t shape[] = {64};
    gpu_ipc_part_spec spec = {.name = "p", .shape = shape, .rank = 1, .type_code = 1, .type_bits = 8};
    check(gpu_ipc_object_scratch(client, "workspace", &spec, 1, &fresh), "scratch");
    memset(bytes, 5, 64);
    check(gpu_ipc_scratch_write(fresh, "p", 0, bytes, 64), "write");
    memset(bytes, 0, 64);
    check(gpu_ipc_scratch_read(fresh, "p", 0, bytes, 64), "read");
    only(5, 64);
    check(gpu_ipc_scratch_close(fresh), "close");
    check(gpu_ipc_stream_close(stream), "close");
}

int main(int argc, char **argv)
{
    require(argc == 2, "usage: objects DIR");
    gpu_ipc_device *device;
    gpu_ipc_client_options options = {.size = sizeof options, .dir = argv[1], .name = "objects"};
    check(gpu_ipc_device_open(GPU_IPC_HOST, 0, &device), "device");
    check(gpu_ipc_client_connect(device, &options, &client), "broker");
    parts_are_taken_over();
    a_part_is_copied();
    a_copy_may_be_written_to(device);
    check(gpu_ipc_client_close(client), "close");
    check(gpu_ipc_device_close(device), "close");
    puts("objects: all went well");
    return 0;
}

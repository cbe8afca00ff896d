// New weights under an engine that goes on: a trainer commits epoch after epoch, and an engine in another process moves to
// each at the same address.
//
//     gpu-ipc broker --dir DIR &      ./hot_swap DIR [EPOCHS] [host|cuda|hip]

#include "common.h"

#include <sys/wait.h>
#include <unistd.h>

enum { WEIGHTS = 1 << 16 };

static gpu_ipc_client *connect_to(const char *dir, gpu_ipc_device *device, const char *name)
{
    gpu_ipc_client *client;
    gpu_ipc_client_options options = {.size = sizeof options, .dir = dir, .name = name};
    check(gpu_ipc_client_connect(device, &options, &client), "broker");
    return client;
}

// Reads all of the weights: they are those of one epoch.
static void look(gpu_ipc_reader *model, float *weights, float epoch)
{
    check(gpu_ipc_reader_read(model, "w", 0, weights, WEIGHTS * sizeof *weights), "read");
    for (size_t at = 0; at < WEIGHTS; ++at) {
        require(weights[at] >= epoch && weights[at] <= epoch, "weights of two epochs");
    }
}

static int engine(const char *dir, uint32_t backend, uint64_t epochs, int begun)
{
    gpu_ipc_device *device;
    gpu_ipc_reader *model;
    uint64_t epoch;
    check(gpu_ipc_device_open(backend, 0, &device), "device");
    gpu_ipc_client *client = connect_to(dir, device, "engine");
    check(gpu_ipc_object_watch(client, "model", 0, INT64_C(60000000000), &epoch), "watch");
    check(gpu_ipc_object_open(client, "model", 0, &model), "open");
    gpu_ipc_part first = {.size = sizeof first};
    check(gpu_ipc_reader_get_part(model, "w", &first), "part");
    require(first.rank == 2 && first.shape[0] == WEIGHTS / 256 && first.shape[1] == 256, "another shape");
    float *weights = malloc(WEIGHTS * sizeof *weights);
    require(weights != NULL, "no memory");
    uint64_t moves = 0;
    require(write(begun, "", 1) == 1, "no trainer");
    for (;;) {
        gpu_ipc_reader_info info = {.size = sizeof info};
        gpu_ipc_part part = {.size = sizeof part};
        check(gpu_ipc_reader_get_info(model, &info), "info");
        check(gpu_ipc_reader_get_part(model, "w", &part), "part");
        require(part.ptr == first.ptr, "the address has changed");
        look(model, weights, (float)info.epoch);
        if (info.epoch >= epochs) {
            break;
        }
        // Asleep it holds no memory; its addresses stay.
        check(gpu_ipc_reader_sleep(model, true), "sleep");
        check(gpu_ipc_object_watch(client, "model", info.epoch, INT64_C(60000000000), &epoch), "watch");
        check(gpu_ipc_reader_wake_to(model, 0), "wake");
        ++moves;
    }
    printf("engine: %llu moves at one address\n", (unsigned long long)moves);
    fflush(stdout);
    free(weights);
    check(gpu_ipc_reader_close(model), "close");
    check(gpu_ipc_client_close(client), "close");
    check(gpu_ipc_device_close(device), "close");
    return moves > 0 || epochs == 1 ? 0 : 1;
}

static void train(const char *dir, uint32_t backend, uint64_t epochs, int begun)
{
    gpu_ipc_device *device;
    check(gpu_ipc_device_open(backend, 0, &device), "device");
    gpu_ipc_client *client = connect_to(dir, device, "trainer");
    uint64_t shape[2] = {WEIGHTS / 256, 256};
    gpu_ipc_part_spec spec = {.name = "w", .shape = shape, .rank = 2, .type_code = 2, .type_bits = 32};
    float *weights = malloc(WEIGHTS * sizeof *weights);
    require(weights != NULL, "no memory");
    for (uint64_t wanted = 1; wanted <= epochs; ++wanted) {
        gpu_ipc_writer *writer;
        uint64_t epoch;
        // Only on top of the epoch before: nobody else trains.
        gpu_ipc_create_options options = {.size = sizeof options, .expect = 1, .expected = wanted - 1};
        check(gpu_ipc_object_create(client, "model", &spec, 1, &options, &writer), "create");
        for (size_t at = 0; at < WEIGHTS; ++at) {
            weights[at] = (float)wanted;
        }
        check(gpu_ipc_writer_write(writer, "w", 0, weights, WEIGHTS * sizeof *weights), "write");
        check(gpu_ipc_writer_commit(writer, NULL, 0, -1, &epoch), "commit");
        require(epoch == wanted, "another epoch");
        // The engine begins with the first epoch, so that it has somewhere to move from.
        char byte;
        require(wanted > 1 || read(begun, &byte, 1) == 1, "the engine has not begun");
    }
    free(weights);
    check(gpu_ipc_client_close(client), "close");
    check(gpu_ipc_device_close(device), "close");
}

int main(int argc, char **argv)
{
    require(argc >= 2 && argc <= 4, "usage: hot_swap DIR [EPOCHS] [host|cuda|hip]");
    uint64_t epochs = argc > 2 ? strtoull(argv[2], NULL, 10) : 5;
    uint32_t backend = vendor(argc > 3 ? argv[3] : "host");
    // Before the first call of the library: a device's driver does not work in a forked child.
    int begun[2];
    require(pipe(begun) == 0, "no pipe");
    pid_t child = fork();
    if (child == 0) {
        close(begun[0]);
        return engine(argv[1], backend, epochs, begun[1]);
    }
    close(begun[1]);
    train(argv[1], backend, epochs, begun[0]);
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the engine failed");
    printf("%llu epochs\n", (unsigned long long)epochs);
    return 0;
}

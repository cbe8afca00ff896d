// Pools in C++: held, adopted and read.
//
//     pools DIR      with a broker in DIR

#include <gpu_ipc.hpp>

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr uint32_t blocks = 4;
constexpr size_t block_bytes = 4096;

void require(bool holds, const std::string &what) {
    if (!holds) {
        throw std::runtime_error(what);
    }
}

template <class Call>
void refuses(int32_t code, const std::string &word, Call call) {
    try {
        call();
    } catch (const gpu_ipc::Error &error) {
        require(error.code() == code && std::string(error.what()).find(word) != std::string::npos,
                std::string("another error: ") + error.what());
        return;
    }
    throw std::runtime_error("no error that says \"" + word + "\"");
}

gpu_ipc_key key(char fill) { return gpu_ipc::key_of(std::string(16, fill)); }

void fill(const gpu_ipc::Pool &pool, uint32_t block, char with, const gpu_ipc::Stream &stream) {
    pool.invalidate(block);
    pool.fill("kv", block * block_bytes, block_bytes, static_cast<uint8_t>(with), stream);
}

void pools(const gpu_ipc::Client &client, const gpu_ipc::Stream &stream) {
    const std::vector<uint64_t> shape{blocks, block_bytes};
    gpu_ipc_part_spec kv{};
    kv.name = "kv";
    kv.shape = shape.data();
    kv.rank = 2;
    kv.type_code = 1;
    kv.type_bits = 8;
    auto options = gpu_ipc::sized<gpu_ipc_create_options>();
    options.user = "layer";
    options.user_len = 5;
    auto pool = client.create_pool("cpp", {kv}, blocks, options);
    require(pool.info().generation == 1 && pool.info().blocks >= blocks && pool.user().size() == 5, "another pool");
    require(pool.part("kv").ptr == pool.part(size_t{0}).ptr && pool.regions().size() == 1, "a part elsewhere");
    refuses(GPU_IPC_REFUSED, "is held by", [&] { client.adopt("cpp"); });
    refuses(GPU_IPC_INVALID, "16 bytes", [] { gpu_ipc::key_of("short"); });

    fill(pool, 0, 'a', stream);
    pool.seal(0, key('a'), stream);
    fill(pool, 1, 'b', stream);
    fill(pool, 2, 'c', stream);
    pool.seal({{key('c'), 2}, {key('b'), 1}}, stream);
    fill(pool, 3, 'd', stream);
    pool.used_on(stream);
    stream.synchronize();
    require(pool.sealed().size() == 3 && pool.sealed().at(2).block == 2, "other blocks are whole");

    std::vector<char> bytes(block_bytes);
    auto reader = client.read_pool("cpp");
    require(reader.info().generation == 1 && reader.user().size() == 5 && reader.sealed().size() == 3, "another pool");
    require(reader.part("kv").len == reader.part(size_t{0}).len, "another part");
    reader.used_on(stream);
    auto found = reader.look(1);
    require(found && found->key.bytes[0] == 'b' && reader.is_still(*found) && !reader.look(3), "another block");
    auto read = reader.read_whole(1, "kv", bytes.data(), bytes.size(), block_bytes);
    require(read && bytes == std::vector<char>(block_bytes, 'b'), "other contents");
    pool.invalidate(1);
    require(!reader.is_still(*found) && !reader.read_whole(1, "kv", bytes.data(), bytes.size(), block_bytes), "it was given up");

    pool.end(stream);
    require(!pool, "a handle of a pool that has ended");
    pool = client.adopt("cpp");
    require(pool.info().generation == 2 && pool.info().previous == GPU_IPC_PREVIOUS_CLOSED, "another hold before");
    require(pool.sealed().size() == 2, "other blocks are whole");
    pool.read("kv", bytes.data(), bytes.size(), 2 * block_bytes);
    require(bytes == std::vector<char>(block_bytes, 'c'), "other contents");
    pool.write("kv", "z", 1);
    pool.end();
    refuses(GPU_IPC_BAD_HANDLE, "a pool is null", [&] { pool.invalidate(0); });
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: pools DIR\n");
        return 2;
    }
    try {
        auto device = gpu_ipc::Device::open(gpu_ipc::Backend::host);
        auto options = gpu_ipc::sized<gpu_ipc_client_options>();
        options.dir = argv[1];
        auto client = gpu_ipc::Client::connect(device, options);
        auto stream = gpu_ipc::Stream::create(device);
        pools(client, stream);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "pools: %s\n", error.what());
        return 1;
    }
    std::printf("pools: all went well\n");
    return 0;
}

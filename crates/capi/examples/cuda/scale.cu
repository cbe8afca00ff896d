// Kernels on both sides: a producer fills a block on its stream, a consumer in another process sums it on its own, and no byte
// is copied between them.
//
//     nvcc -std=c++17 scale.cu -I PREFIX/include -L PREFIX/lib -lgpu_ipc && ./a.out SOCKET [ROUNDS]

#include <gpu_ipc.hpp>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

namespace {

constexpr unsigned elements = 1u << 22;

void cuda(cudaError_t code) {
    if (code != cudaSuccess) {
        throw std::runtime_error(cudaGetErrorString(code));
    }
}

__global__ void fill(unsigned *block, unsigned round) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < elements) {
        block[at] = round + at;
    }
}

// Counts the elements that are not those of the round.
__global__ void differ(const unsigned *block, unsigned round, unsigned *count) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < elements && block[at] != round + at) {
        atomicAdd(count, 1);
    }
}

void consume(const std::string &path, int from, unsigned rounds) {
    cudaStream_t own;
    unsigned *count, found = 0;
    cuda(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    cuda(cudaMalloc(&count, sizeof *count));
    cuda(cudaMemsetAsync(count, 0, sizeof *count, own));
    auto device = gpu_ipc::Device::open(gpu_ipc::Backend::cuda);
    auto stream = gpu_ipc::Stream::borrow(device, own);
    auto producer = gpu_ipc::Participant::connect(device, path);
    unsigned seen = 0;
    gpu_ipc::Descriptor descriptor;
    while (read(from, &descriptor, sizeof descriptor) == static_cast<ssize_t>(sizeof descriptor)) {
        // The stream waits for the producer's kernel, this thread for nothing.
        auto block = producer.claim(descriptor, stream);
        differ<<<elements / 256, 256, 0, own>>>(static_cast<const unsigned *>(block.ptr()), seen, count);
        cuda(cudaGetLastError());
        ++seen;
        // Closed here: the lease ends behind the kernel.
    }
    cuda(cudaMemcpyAsync(&found, count, sizeof found, cudaMemcpyDeviceToHost, own));
    cuda(cudaStreamSynchronize(own));
    stream.reset();
    producer.leave();
    if (seen != rounds || found != 0) {
        throw std::runtime_error(std::to_string(found) + " elements are others, in " + std::to_string(seen) + " rounds");
    }
}

void produce(const std::string &path, int to, int ready, unsigned rounds) {
    cudaStream_t own;
    cuda(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    auto device = gpu_ipc::Device::open(gpu_ipc::Backend::cuda);
    auto stream = gpu_ipc::Stream::borrow(device, own);
    auto session = gpu_ipc::Session::open(device, path);
    if (write(ready, "r", 1) != 1) {
        throw std::runtime_error("the consumer is gone");
    }
    uint64_t consumer = session.participants(1, std::chrono::seconds(60)).at(0);
    for (unsigned round = 0; round < rounds; ++round) {
        auto block = session.alloc(elements * sizeof(unsigned), std::chrono::seconds(60));
        fill<<<elements / 256, 256, 0, own>>>(static_cast<unsigned *>(block.ptr()), round);
        cuda(cudaGetLastError());
        auto descriptor = block.share(gpu_ipc::To::one(consumer), stream);
        if (write(to, &descriptor, sizeof descriptor) != static_cast<ssize_t>(sizeof descriptor)) {
            throw std::runtime_error("the consumer is gone");
        }
    }
    close(to);
    session.shutdown(std::chrono::seconds(60));
    auto stats = session.stats();
    if (stats.live_blocks != 0 || stats.deaths != 0) {
        throw std::runtime_error("something is left");
    }
    std::printf("%u rounds of %zu bytes by kernels on both sides\n", rounds, elements * sizeof(unsigned));
}

}  // namespace

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: scale SOCKET [ROUNDS]\n");
        return 2;
    }
    unsigned rounds = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 100;
    int descriptors[2], ready[2];
    if (pipe(descriptors) != 0 || pipe(ready) != 0) {
        return 1;
    }
    // Before the first call of CUDA, which does not work in a forked child.
    pid_t child = fork();
    try {
        if (child == 0) {
            close(descriptors[1]);
            close(ready[1]);
            char byte;
            if (read(ready[0], &byte, 1) != 1) {
                return 1;
            }
            consume(argv[1], descriptors[0], rounds);
            return 0;
        }
        close(descriptors[0]);
        produce(argv[1], descriptors[1], ready[1], rounds);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s: %s\n", child == 0 ? "consumer" : "producer", error.what());
        return 1;
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
}

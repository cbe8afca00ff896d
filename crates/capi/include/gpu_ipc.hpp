// gpu_ipc.hpp: gpu_ipc.h for C++17. Header only.
//
// Each handle of the C library is a class that closes it. Failures are gpu_ipc::Error. What a function keeps, which thread
// may call it, whether it blocks and its errors: see the function of the same name in gpu_ipc.h.
//
// Functions throw where those of gpu_ipc.h fail, but for close, release, reset and get, which do not fail. What an owner's
// or a stream's destructor throws in a callback of the library ends the process by std::terminate.
//
// Without exceptions, as with -fno-exceptions: `attempt` and `make` call functions of gpu_ipc.h and return a `result`. What would throw
// writes its error to standard error and aborts.

#ifndef GPU_IPC_HPP
#define GPU_IPC_HPP

#include <gpu_ipc.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace gpu_ipc {

// Numbers of gpu_ipc.h with types. A later library may give others than are listed.

/// Which vendor's devices: `first` takes the first that there is.
enum class Backend : uint32_t { first = 0, host = GPU_IPC_HOST, cuda = GPU_IPC_CUDA, hip = GPU_IPC_HIP };

/// What the log tells at least.
enum class LogLevel : uint32_t { error = GPU_IPC_LOG_ERROR, warn = GPU_IPC_LOG_WARN, info = GPU_IPC_LOG_INFO, debug = GPU_IPC_LOG_DEBUG };

/// Whether the contents of a received block are whole.
enum class State : uint32_t {
    pending = GPU_IPC_STATE_PENDING,
    ready = GPU_IPC_STATE_READY,
    ready_producer_gone = GPU_IPC_STATE_READY_PRODUCER_GONE,
    poisoned = GPU_IPC_STATE_POISONED
};

/// What came of a commit.
enum class Outcome : uint32_t {
    committed = GPU_IPC_OUTCOME_COMMITTED,
    unfinished = GPU_IPC_OUTCOME_UNFINISHED,
    unknown = GPU_IPC_OUTCOME_UNKNOWN
};

/// What a call failed with: its code, text and remedy. Copies do not throw.
class Error : public std::exception {
public:
    /// Takes the texts of this thread's last failure.
    explicit Error(int32_t code) : Error(code, gpu_ipc_last_error_text(), gpu_ipc_last_error_remedy()) {}
    Error(int32_t code, std::string what, std::string remedy)
        : code_(code), texts_(std::make_shared<const Texts>(Texts{std::move(what), std::move(remedy)})) {}

    /// GPU_IPC_...; a later library may have codes that this header does not list.
    int32_t code() const noexcept { return code_; }
    const char *what() const noexcept override { return texts_->what.c_str(); }
    /// What to do; empty where there is nothing.
    const char *remedy() const noexcept { return texts_->remedy.c_str(); }

private:
    struct Texts {
        std::string what;
        std::string remedy;
    };

    int32_t code_;
    std::shared_ptr<const Texts> texts_;
};

/// Throws an error, or aborts where the program is compiled without exceptions.
[[noreturn]] inline void fail(const Error &error) {
#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
    throw Error(error);
#else
    std::fprintf(stderr, "gpu_ipc: %s; %s\n", error.what(), error.remedy());
    std::abort();
#endif
}

/// Throws what a call failed with.
inline void check(int32_t code) {
    if (code != GPU_IPC_OK) {
        fail(Error(code));
    }
}

/// A value, or the error that there is in its place: what C++23 has in std::expected<T, Error>, for C++17.
template <class T>
class [[nodiscard]] result {
public:
    result(T value) : held_(std::in_place_index<0>, std::move(value)) {}
    result(Error error) noexcept : held_(std::in_place_index<1>, std::move(error)) {}

    bool has_value() const noexcept { return held_.index() == 0; }
    explicit operator bool() const noexcept { return has_value(); }
    /// The value; without one the error is thrown.
    T &value() & { return has_value() ? **this : (fail(error()), **this); }
    T &&value() && { return std::move(value()); }
    /// The value, which must be there.
    T &operator*() noexcept { return *std::get_if<0>(&held_); }
    T *operator->() noexcept { return std::get_if<0>(&held_); }
    /// The error, which must be there.
    const Error &error() const noexcept { return *std::get_if<1>(&held_); }

private:
    std::variant<T, Error> held_;
};

/// Success, or an error.
template <>
class [[nodiscard]] result<void> {
public:
    result() noexcept = default;
    result(Error error) : error_(std::move(error)) {}

    bool has_value() const noexcept { return !error_; }
    explicit operator bool() const noexcept { return has_value(); }
    /// Throws the error, if there is one.
    void value() const {
        if (error_) {
            fail(*error_);
        }
    }
    /// The error, which must be there.
    const Error &error() const noexcept { return *error_; }

private:
    std::optional<Error> error_;
};

/// What a function makes for a T: the handle of an owner, or the T itself.
template <class T, class = void>
struct Made {
    using type = T;
};
template <class T>
struct Made<T, std::void_t<typename T::handle_type>> {
    using type = typename T::handle_type *;
};

/// Calls a function of gpu_ipc.h that returns a code: attempt(gpu_ipc_block_write, block.get(), 0, bytes, len, stream.get()).
template <class... Parameters, class... Arguments>
result<void> attempt(int32_t (*function)(Parameters...), Arguments &&...arguments) {
    const int32_t code = function(std::forward<Arguments>(arguments)...);
    return code == GPU_IPC_OK ? result<void>() : result<void>(Error(code));
}

/// Calls a function of gpu_ipc.h whose last parameter takes what it makes: make<Stream>(gpu_ipc_stream_create, device.get()) is an
/// owner of the handle, and make<Descriptor>(gpu_ipc_share, ...) a structure or a number.
template <class T, class... Parameters, class... Arguments>
result<T> make(int32_t (*function)(Parameters...), Arguments &&...arguments) {
    typename Made<T>::type made{};
    const int32_t code = function(std::forward<Arguments>(arguments)..., &made);
    if (code != GPU_IPC_OK) {
        return Error(code);
    }
    return T(std::move(made));
}

/// Passes a result on, and throws if it is the one that says that the call failed.
template <class T>
T unless(T failed, T result) {
    if (result == failed) {
        fail(Error(gpu_ipc_last_error()));
    }
    return result;
}

/// The version of the library that runs, as GPU_IPC_VERSION, which is that of the header.
inline uint32_t version() noexcept { return gpu_ipc_version(); }

/// Writes the library's log to a descriptor.
inline void log_to(int fd, LogLevel level = LogLevel::warn) { check(gpu_ipc_log_to(fd, static_cast<uint32_t>(level))); }

/// Calls that are asked not to wait.
inline constexpr std::chrono::nanoseconds no_wait{0};
/// Calls that wait for ever.
inline constexpr std::chrono::nanoseconds forever{-1};

/// A structure that begins with its size, all else zero.
template <class T>
T sized() {
    T value{};
    value.size = sizeof(T);
    return value;
}

/// A handle that is closed with the object that has it.
template <class T, int32_t (*Close)(T *)>
class Handle {
public:
    using handle_type = T;

    Handle() noexcept = default;
    explicit Handle(T *handle) noexcept : handle_(handle) {}
    Handle(Handle &&other) noexcept : handle_(other.release()) {}
    Handle &operator=(Handle &&other) noexcept {
        reset(other.release());
        return *this;
    }
    Handle(const Handle &) = delete;
    Handle &operator=(const Handle &) = delete;
    ~Handle() { reset(); }

    /// The handle, for functions of gpu_ipc.h.
    T *get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != nullptr; }
    /// Gives the handle up: its closing is the caller's.
    T *release() noexcept { return std::exchange(handle_, nullptr); }
    void reset(T *handle = nullptr) noexcept { Close(std::exchange(handle_, handle)); }

private:
    T *handle_ = nullptr;
};

using Descriptor = gpu_ipc_descriptor;

/// Reads what a descriptor says.
inline gpu_ipc_descriptor_info info_of(const Descriptor &descriptor) {
    auto info = sized<gpu_ipc_descriptor_info>();
    check(gpu_ipc_descriptor_get_info(descriptor.bytes, sizeof descriptor.bytes, &info));
    return info;
}

/// Whom a lease is for. The default, and one(0), is no participant, and refused.
struct To {
    uint64_t participant = 0;
    uint32_t claims = 0;

    static To one(uint64_t participant) { return {participant, 0}; }
    /// The first `claims` participants that ask.
    static To ticket(uint32_t claims) { return {0, claims}; }
    /// Everybody, as long as the block is not closed.
    static To everybody() { return {0, GPU_IPC_EVERYBODY}; }
};

class Device : public Handle<gpu_ipc_device, gpu_ipc_device_close> {
public:
    using Handle::Handle;

    static Device open(Backend backend = Backend::first, uint32_t number = 0) {
        gpu_ipc_device *device;
        check(gpu_ipc_device_open(static_cast<uint32_t>(backend), number, &device));
        return Device(device);
    }

    /// Opens every device that can be used, GPUs first.
    static std::vector<Device> all() {
        std::vector<gpu_ipc_device *> handles(16, nullptr);
        for (;;) {
            size_t count = 0;
            check(gpu_ipc_detect(handles.data(), handles.size(), &count));
            std::vector<Device> devices;
            devices.reserve(count);
            for (size_t at = 0; at < count && at < handles.size(); ++at) {
                devices.emplace_back(handles[at]);
            }
            if (count <= handles.size()) {
                return devices;
            }
            handles.assign(count, nullptr);
        }
    }

    gpu_ipc_device_info info() const {
        auto info = sized<gpu_ipc_device_info>();
        check(gpu_ipc_device_get_info(get(), &info));
        return info;
    }
};

class Stream : public Handle<gpu_ipc_stream, gpu_ipc_stream_close> {
public:
    using Handle::Handle;

    static Stream create(const Device &device) {
        gpu_ipc_stream *stream;
        check(gpu_ipc_stream_create(device.get(), &stream));
        return Stream(stream);
    }

    /// Takes an application's stream, a cudaStream_t or hipStream_t, which lives until the process ends.
    static Stream borrow(const Device &device, void *handle) {
        gpu_ipc_stream *stream;
        check(gpu_ipc_stream_borrow(device.get(), handle, nullptr, nullptr, &stream));
        return Stream(stream);
    }

    /// Takes an application's stream that `keep` keeps alive: it is dropped, on a thread of the library's, when the stream is
    /// not needed any more.
    template <class T>
    static Stream borrow(const Device &device, void *handle, std::shared_ptr<T> keep) {
        auto held = std::make_unique<std::shared_ptr<void>>(std::move(keep));
        auto released = [](void *context) noexcept { delete static_cast<std::shared_ptr<void> *>(context); };
        gpu_ipc_stream *stream;
        check(gpu_ipc_stream_borrow(device.get(), handle, released, held.get(), &stream));
        held.release();
        return Stream(stream);
    }

    void synchronize() const { check(gpu_ipc_stream_synchronize(get())); }
};

/// What the contents of a block are shared after: what is queued on a stream, or nothing, because all work is done. A stream
/// that is empty or was moved from is refused.
class After {
public:
    // Streams stand for themselves: share(to, stream).
    After(const Stream &stream) : stream_(stream.get()) {
        if (!stream) {
            fail(Error(GPU_IPC_BAD_HANDLE, "the stream to share after is empty or was moved from",
                        "name a stream, or say After::done()"));
        }
    }
    /// All work on the block is done.
    static After done() noexcept { return After(); }

    gpu_ipc_stream *get() const noexcept { return stream_; }

private:
    After() noexcept = default;

    gpu_ipc_stream *stream_ = nullptr;
};

/// Where the producer's work is waited for: on a stream, or by the calling thread. A stream that is empty or was moved from
/// is refused.
class Wait {
public:
    // Streams stand for themselves: claim(descriptor, stream).
    Wait(const Stream &stream) : stream_(stream.get()) {
        if (!stream) {
            fail(Error(GPU_IPC_BAD_HANDLE, "the stream to wait on is empty or was moved from",
                        "name a stream, or say Wait::here()"));
        }
    }
    /// The calling thread waits.
    static Wait here() noexcept { return Wait(); }

    gpu_ipc_stream *get() const noexcept { return stream_; }

private:
    Wait() noexcept = default;

    gpu_ipc_stream *stream_ = nullptr;
};

/// How a lease is granted.
struct ShareOptions {
    /// Up to 64 bytes of the user's own; more are refused.
    std::string_view user;
    /// How long the grant can be claimed, above 0 or `forever`; nothing for what the session was opened with.
    std::optional<std::chrono::nanoseconds> time_to_live;
    /// Grants the block to be read only: a write to it faults where it is received.
    bool read_only = false;

    gpu_ipc_share_options to_c() const {
        auto options = sized<gpu_ipc_share_options>();
        if (user.size() > sizeof options.user) {
            fail(Error(GPU_IPC_INVALID, "the user's bytes are " + std::to_string(user.size()) + ", but must be at most 64",
                        "send the rest beside the descriptor"));
        }
        if (time_to_live && time_to_live->count() == 0) {
            fail(Error(GPU_IPC_INVALID, "the time to live is 0, but must be above 0, or `forever`",
                        "leave it out for what the session was opened with"));
        }
        if (!user.empty()) {
            std::memcpy(options.user, user.data(), user.size());
        }
        options.time_to_live_ns = time_to_live ? time_to_live->count() : 0;
        options.read_only = read_only;
        return options;
    }
};

class Block : public Handle<gpu_ipc_block, gpu_ipc_block_close> {
public:
    using Handle::Handle;

    void *ptr() const { return unless<void *>(nullptr, gpu_ipc_block_ptr(get())); }
    uint64_t size() const { return unless<uint64_t>(0, gpu_ipc_block_len(get())); }
    /// How many leases are granted or held.
    size_t outstanding() const { return unless<size_t>(SIZE_MAX, gpu_ipc_block_outstanding(get())); }
    void used_on(const Stream &stream) const { check(gpu_ipc_block_used_on(get(), stream.get())); }

    /// Grants a lease after what is queued on a stream, or `After::done()`.
    Descriptor share(To to, const After &after, const ShareOptions &options = {}) const {
        Descriptor descriptor;
        auto given = options.to_c();
        check(to.claims == 0 ? gpu_ipc_share(get(), to.participant, after.get(), &given, &descriptor)
                                  : gpu_ipc_share_ticket(get(), to.claims, after.get(), &given, &descriptor));
        return descriptor;
    }

    /// Takes a grant back, and says whether it did.
    bool cancel(const Descriptor &descriptor) const {
        bool cancelled = false;
        check(gpu_ipc_block_cancel(get(), &descriptor, &cancelled));
        return cancelled;
    }

    /// Waits until no lease is outstanding; false when the time was over first.
    bool wait_released(std::chrono::nanoseconds timeout = forever) const {
        int32_t code = gpu_ipc_block_wait_released(get(), timeout.count());
        if (code != GPU_IPC_DEADLINE) {
            check(code);
        }
        return code == GPU_IPC_OK;
    }

    void write(const void *bytes, size_t len, const Stream &stream, uint64_t offset = 0) const {
        check(gpu_ipc_block_write(get(), offset, bytes, len, stream.get()));
    }
    void read(void *bytes, size_t len, const Stream &stream, uint64_t offset = 0) const {
        check(gpu_ipc_block_read(get(), offset, bytes, len, stream.get()));
    }
};

/// A block that is lent: shared any number of times, with any addressee, until the loan ends, by `end` or with this object.
class Loan : public Handle<gpu_ipc_loan, gpu_ipc_loan_close> {
public:
    using Handle::Handle;

    /// Lends a block after what is queued on a stream, or `After::done()`.
    static Loan of(const Block &block, const After &after) {
        gpu_ipc_loan *loan;
        check(gpu_ipc_lend(block.get(), after.get(), &loan));
        return Loan(loan);
    }

    /// How many leases are granted or held; none once it has ended.
    size_t outstanding() const { return unless<size_t>(SIZE_MAX, gpu_ipc_loan_outstanding(get())); }

    /// Grants a lease. A broadcast is claimed by every participant, again and again, until the loan ends.
    Descriptor share(To to, const ShareOptions &options = {}) const {
        Descriptor descriptor;
        auto given = options.to_c();
        check(to.claims == 0 ? gpu_ipc_loan_share(get(), to.participant, &given, &descriptor)
                             : gpu_ipc_loan_share_ticket(get(), to.claims, &given, &descriptor));
        return descriptor;
    }

    /// Ends the loan; what is held stays good for its holders.
    void end() const { check(gpu_ipc_loan_release(get())); }

    /// Waits until the loan has ended and its last holder is done; false when the time was over first.
    bool wait_released(std::chrono::nanoseconds timeout = forever) const {
        int32_t code = gpu_ipc_loan_wait_released(get(), timeout.count());
        if (code != GPU_IPC_DEADLINE) {
            check(code);
        }
        return code == GPU_IPC_OK;
    }
};

class Session : public Handle<gpu_ipc_session, gpu_ipc_session_close> {
public:
    using Handle::Handle;

    /// Opens a session; the options' pointers are read during the call alone.
    static Session open(const Device &device, gpu_ipc_session_options options = sized<gpu_ipc_session_options>()) {
        gpu_ipc_session *session;
        check(gpu_ipc_session_open(device.get(), &options, &session));
        return Session(session);
    }

    /// Opens a session that listens on a path.
    static Session open(const Device &device, const std::string &socket) {
        auto options = sized<gpu_ipc_session_options>();
        options.socket = socket.c_str();
        return open(device, options);
    }

    std::string path() const {
        std::array<char, 4096> path;
        check(gpu_ipc_session_path(get(), path.data(), path.size()));
        return path.data();
    }

    Block alloc(uint64_t len, std::chrono::nanoseconds timeout = no_wait) const {
        gpu_ipc_block *block;
        check(gpu_ipc_alloc(get(), len, timeout.count(), &block));
        return Block(block);
    }

    /// Shares memory of another allocator, which `owner` keeps: it is dropped by a collect or shutdown of this session when
    /// nobody holds or maps the memory any more.
    template <class T>
    Block adopt(void *memory, uint64_t len, std::shared_ptr<T> owner) const {
        auto held = std::make_unique<std::shared_ptr<void>>(std::move(owner));
        auto returned = [](void *context) noexcept { delete static_cast<std::shared_ptr<void> *>(context); };
        gpu_ipc_block *block;
        check(gpu_ipc_adopt(get(), memory, len, returned, held.get(), &block));
        held.release();
        return Block(block);
    }

    /// Takes back what a descriptor grants and is unclaimed, and says whether there was something.
    bool revoke(const Descriptor &descriptor) const {
        bool revoked = false;
        check(gpu_ipc_session_revoke(get(), &descriptor, &revoked));
        return revoked;
    }

    /// Shares several blocks after the same work.
    std::vector<Descriptor> share_many(const std::vector<std::pair<const Block *, To>> &grants, const After &after,
                                       const ShareOptions &options = {}) const {
        std::vector<gpu_ipc_grant> given;
        given.reserve(grants.size());
        for (const auto &[block, to] : grants) {
            given.push_back({block->get(), to.participant, to.claims, 0});
        }
        std::vector<Descriptor> descriptors(grants.size());
        auto how = options.to_c();
        check(gpu_ipc_share_many(get(), given.data(), given.size(), after.get(), &how, descriptors.data()));
        return descriptors;
    }

    /// The participants that are connected; it waits until there are `least` of them.
    std::vector<uint64_t> participants(size_t least = 0, std::chrono::nanoseconds timeout = forever) const {
        std::vector<uint64_t> numbers(64);
        size_t count = 0;
        check(gpu_ipc_session_participants(get(), least, timeout.count(), numbers.data(), numbers.size(), &count));
        if (count > numbers.size()) {
            numbers.resize(count);
            check(gpu_ipc_session_participants(get(), 0, 0, numbers.data(), numbers.size(), &count));
        }
        numbers.resize(count < numbers.size() ? count : numbers.size());
        return numbers;
    }

    gpu_ipc_collected collect() const {
        auto collected = sized<gpu_ipc_collected>();
        check(gpu_ipc_session_collect(get(), &collected));
        return collected;
    }

    gpu_ipc_stats stats() const {
        auto stats = sized<gpu_ipc_stats>();
        check(gpu_ipc_session_get_stats(get(), &stats));
        return stats;
    }

    /// What a participant calls itself, or else the command that it runs; that of one that left is known after its notice.
    std::string participant_name(uint64_t participant) const {
        std::array<char, 256> name;
        check(gpu_ipc_session_participant_name(get(), participant, name.data(), name.size()));
        return name.data();
    }

    /// Takes in a connection that reached the program in another way; the caller closes its own copy afterwards.
    void accept(int connection) const { check(gpu_ipc_session_accept(get(), connection)); }

    /// Returns regions that are not used or mapped to the driver, and says how many bytes.
    uint64_t trim() const {
        uint64_t bytes = 0;
        check(gpu_ipc_session_trim(get(), &bytes));
        return bytes;
    }

    /// The descriptor that is readable while there is a notice.
    int fd() const { return unless(-1, gpu_ipc_session_fd(get())); }

    gpu_ipc_notice next_notice() const {
        gpu_ipc_notice notice{};
        check(gpu_ipc_session_next_notice(get(), &notice));
        return notice;
    }

    void shutdown(std::chrono::nanoseconds timeout = forever) const {
        check(gpu_ipc_session_shutdown(get(), timeout.count()));
    }
};

class Received : public Handle<gpu_ipc_received, gpu_ipc_received_close> {
public:
    using Handle::Handle;

    void *ptr() const { return unless<void *>(nullptr, gpu_ipc_received_ptr(get())); }
    uint64_t size() const { return unless<uint64_t>(0, gpu_ipc_received_len(get())); }
    /// The number of its region, as GPU_IPC_NOTICE_PLEASE_UNMAP has it.
    uint64_t region() const {
        gpu_ipc_clear_error();
        uint64_t region = gpu_ipc_received_region(get());
        check(gpu_ipc_last_error());
        return region;
    }
    /// Whether it is only read: it was shared so, or the participant maps so.
    bool is_read_only() const {
        bool read_only = true;
        check(gpu_ipc_received_is_read_only(get(), &read_only));
        return read_only;
    }
    State state() const {
        uint32_t state = 0;
        check(gpu_ipc_received_state(get(), &state));
        return static_cast<State>(state);
    }
    void used_on(const Stream &stream) const { check(gpu_ipc_received_used_on(get(), stream.get())); }
    /// Queues the wait for the producer's work on a stream, or waits here.
    void wait(const Wait &wait = Wait::here(), std::chrono::nanoseconds timeout = forever) const {
        check(gpu_ipc_received_wait(get(), wait.get(), timeout.count()));
    }
    Received slice(uint64_t offset, uint64_t len) const {
        gpu_ipc_received *part;
        check(gpu_ipc_received_slice(get(), offset, len, &part));
        return Received(part);
    }
    /// Asks the producer for a descriptor for another participant, with up to 64 bytes of the user's own.
    Descriptor forward(To to, std::chrono::nanoseconds timeout = forever, std::string_view user = {}) const {
        Descriptor descriptor;
        auto bytes = reinterpret_cast<const uint8_t *>(user.data());
        check(gpu_ipc_received_forward_with(get(), to.participant, to.claims, bytes, user.size(), timeout.count(), &descriptor));
        return descriptor;
    }
    void write(const void *bytes, size_t len, const Stream &stream, uint64_t offset = 0) const {
        check(gpu_ipc_received_write(get(), offset, bytes, len, stream.get()));
    }
    void read(void *bytes, size_t len, const Stream &stream, uint64_t offset = 0) const {
        check(gpu_ipc_received_read(get(), offset, bytes, len, stream.get()));
    }

    /// Closes many at the cost of a few.
    static void close_many(std::vector<Received> blocks) {
        std::vector<gpu_ipc_received *> handles;
        handles.reserve(blocks.size());
        for (auto &block : blocks) {
            handles.push_back(block.release());
        }
        check(gpu_ipc_received_close_many(handles.data(), handles.size()));
    }
};

class Participant : public Handle<gpu_ipc_participant, gpu_ipc_participant_close> {
public:
    using Handle::Handle;

    static Participant connect(const Device &device, const std::string &path,
                               gpu_ipc_connect_options options = sized<gpu_ipc_connect_options>()) {
        gpu_ipc_participant *participant;
        check(gpu_ipc_connect(device.get(), path.c_str(), &options, &participant));
        return Participant(participant);
    }

    /// Joins a session by a connection that was made elsewhere; the caller closes its own copy afterwards.
    static Participant connect_by(const Device &device, int connection,
                                  gpu_ipc_connect_options options = sized<gpu_ipc_connect_options>()) {
        gpu_ipc_participant *participant;
        check(gpu_ipc_connect_by(device.get(), connection, &options, &participant));
        return Participant(participant);
    }

    uint64_t id() const { return unless<uint64_t>(0, gpu_ipc_participant_id(get())); }
    /// The descriptor that is readable while there is a notice.
    int fd() const { return unless(-1, gpu_ipc_participant_fd(get())); }

    /// Asks ahead for what the claims of these descriptors will need.
    void prefetch(const std::vector<Descriptor> &descriptors) const {
        check(gpu_ipc_participant_prefetch(get(), descriptors.data(), descriptors.size()));
    }
    /// Gives up what a claim that would have blocked, or a prefetch, asked for.
    void abandon(const Descriptor &descriptor) const {
        check(gpu_ipc_participant_abandon(get(), descriptor.bytes, sizeof descriptor.bytes));
    }

    gpu_ipc_notice next_notice() const {
        gpu_ipc_notice notice{};
        check(gpu_ipc_participant_next_notice(get(), &notice));
        return notice;
    }

    /// Claims what a descriptor grants; the producer's work is waited for on a stream, or here.
    Received claim(const Descriptor &descriptor, const Wait &wait = Wait::here(),
                   std::chrono::nanoseconds timeout = forever) const {
        gpu_ipc_received *received;
        check(gpu_ipc_claim(get(), descriptor.bytes, sizeof descriptor.bytes, GPU_IPC_WAIT, wait.get(),
                            timeout.count(), &received));
        return Received(received);
    }

    /// Claims if that needs no waiting; nothing when it would.
    std::optional<Received> try_claim(const Descriptor &descriptor, const Wait &wait = Wait::here()) const {
        gpu_ipc_received *received;
        int32_t code = gpu_ipc_try_claim(get(), descriptor.bytes, sizeof descriptor.bytes, GPU_IPC_WAIT, wait.get(),
                                         &received);
        if (code == GPU_IPC_WOULD_BLOCK) {
            return std::nullopt;
        }
        check(code);
        return Received(received);
    }

    /// Claims several. Where one fails its code is in `codes`, if that is given; else the first failure is thrown, and what
    /// was claimed is closed.
    std::vector<Received> claim_many(const std::vector<Descriptor> &descriptors, const Wait &wait = Wait::here(),
                                     std::chrono::nanoseconds timeout = forever,
                                     std::vector<int32_t> *codes = nullptr) const {
        std::vector<gpu_ipc_received *> handles(descriptors.size());
        if (codes) {
            codes->assign(descriptors.size(), GPU_IPC_OK);
        }
        int32_t code = gpu_ipc_claim_many(get(), descriptors.data(), descriptors.size(), GPU_IPC_WAIT, wait.get(),
                                          timeout.count(), handles.data(), codes ? codes->data() : nullptr);
        std::vector<Received> received(handles.begin(), handles.end());
        if (!codes) {
            check(code);
        }
        return received;
    }

    /// Closes it, and waits until the producer knows.
    void leave(std::chrono::nanoseconds timeout = forever) {
        check(gpu_ipc_participant_leave(release(), timeout.count()));
    }
};

class Writer : public Handle<gpu_ipc_writer, gpu_ipc_writer_close> {
public:
    using Handle::Handle;

    gpu_ipc_part part(const std::string &name) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_writer_get_part(get(), name.c_str(), &part));
        return part;
    }
    gpu_ipc_identity identity() const {
        gpu_ipc_identity identity;
        check(gpu_ipc_writer_identity(get(), &identity));
        return identity;
    }
    void write(const std::string &part, const void *bytes, size_t len, uint64_t offset = 0) const {
        check(gpu_ipc_writer_write(get(), part.c_str(), offset, bytes, len));
    }
    void used_on(const Stream &stream) const { check(gpu_ipc_writer_used_on(get(), stream.get())); }

    /// Makes the object visible behind the streams that were named, waits for that, and returns its epoch.
    uint64_t commit(std::chrono::nanoseconds timeout = forever) {
        uint64_t epoch = 0;
        check(gpu_ipc_writer_commit(release(), nullptr, 0, timeout.count(), &epoch));
        return epoch;
    }
};

/// Memory of a broker that goes with this process.
class Scratch : public Handle<gpu_ipc_scratch, gpu_ipc_scratch_close> {
public:
    using Handle::Handle;

    gpu_ipc_part part(const std::string &name) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_scratch_get_part(get(), name.c_str(), &part));
        return part;
    }
    void write(const std::string &part, const void *bytes, size_t len, uint64_t offset = 0) const {
        check(gpu_ipc_scratch_write(get(), part.c_str(), offset, bytes, len));
    }
    void read(const std::string &part, void *bytes, size_t len, uint64_t offset = 0) const {
        check(gpu_ipc_scratch_read(get(), part.c_str(), offset, bytes, len));
    }
    void used_on(const Stream &stream) const { check(gpu_ipc_scratch_used_on(get(), stream.get())); }
};

class Reader : public Handle<gpu_ipc_reader, gpu_ipc_reader_close> {
public:
    using Handle::Handle;

    gpu_ipc_reader_info info() const {
        auto info = sized<gpu_ipc_reader_info>();
        check(gpu_ipc_reader_get_info(get(), &info));
        return info;
    }
    gpu_ipc_part part(const std::string &name) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_reader_get_part(get(), name.c_str(), &part));
        return part;
    }
    gpu_ipc_part part(size_t number) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_reader_get_part_at(get(), number, &part));
        return part;
    }
    /// The bytes of the user's own that lie beside the parts.
    std::vector<std::byte> user() const {
        std::vector<std::byte> bytes(static_cast<size_t>(info().user_len));
        check(gpu_ipc_reader_user(get(), bytes.data(), bytes.size()));
        return bytes;
    }
    void read(const std::string &part, void *bytes, size_t len, uint64_t offset = 0) const {
        check(gpu_ipc_reader_read(get(), part.c_str(), offset, bytes, len));
    }
    void used_on(const Stream &stream) const { check(gpu_ipc_reader_used_on(get(), stream.get())); }
    /// Moves to an epoch, 0 for the newest, and says whether it was another one.
    bool advance(uint64_t epoch = 0) const {
        bool moved = false;
        check(gpu_ipc_reader_advance(get(), epoch, &moved));
        return moved;
    }
    /// Moves to the object of an identity, and says whether it was another one.
    bool advance(const gpu_ipc_identity &identity) const {
        bool moved = false;
        check(gpu_ipc_reader_advance_identity(get(), &identity, &moved));
        return moved;
    }
    void sleep(bool release = false) const { check(gpu_ipc_reader_sleep(get(), release)); }
    void wake() const { check(gpu_ipc_reader_wake(get())); }
    /// Maps an epoch, 0 for the newest.
    void wake_to(uint64_t epoch = 0) const { check(gpu_ipc_reader_wake_to(get(), epoch)); }
    /// Copies a part into that of the same name of an object that is being filled.
    void copy_part(const std::string &part, const Writer &to) const {
        check(gpu_ipc_reader_copy_part(get(), part.c_str(), to.get()));
    }
    /// Copies the whole object into memory of this process that may be written to.
    Scratch writable_copy() const {
        gpu_ipc_scratch *scratch;
        check(gpu_ipc_reader_writable_copy(get(), &scratch));
        return Scratch(scratch);
    }
};

/// The blocks that a function of gpu_ipc.h lists: asked again while there are more than there is room for.
template <class List>
std::vector<gpu_ipc_sealed> sealed_of(List list) {
    std::vector<gpu_ipc_sealed> sealed;
    for (size_t count = 0;;) {
        check(list(sealed.data(), sealed.size(), &count));
        const bool fits = count <= sealed.size();
        sealed.resize(count);
        if (fits) {
            return sealed;
        }
    }
}

/// The key of 16 bytes.
inline gpu_ipc_key key_of(std::string_view bytes) {
    gpu_ipc_key key{};
    if (bytes.size() != sizeof key.bytes) {
        fail(Error(GPU_IPC_INVALID, "the key of a block is " + std::to_string(bytes.size()) + " bytes long, but must be 16 bytes",
                    "pass 16 bytes, such as a digest"));
    }
    std::memcpy(key.bytes, bytes.data(), sizeof key.bytes);
    return key;
}

/// A pool that this process holds; the hold ends with it, behind the streams that were named.
class Pool : public Handle<gpu_ipc_pool, gpu_ipc_pool_close> {
public:
    using Handle::Handle;

    gpu_ipc_pool_info info() const {
        auto info = sized<gpu_ipc_pool_info>();
        check(gpu_ipc_pool_get_info(get(), &info));
        return info;
    }
    /// The bytes of the user's own that lie beside the parts.
    std::vector<std::byte> user() const {
        std::vector<std::byte> bytes(static_cast<size_t>(info().user_len));
        check(gpu_ipc_pool_user(get(), bytes.data(), bytes.size()));
        return bytes;
    }
    gpu_ipc_part part(const std::string &name) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_pool_get_part(get(), name.c_str(), &part));
        return part;
    }
    gpu_ipc_part part(size_t number) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_pool_get_part_at(get(), number, &part));
        return part;
    }
    /// The regions in which all parts lie.
    std::vector<gpu_ipc_region> regions() const {
        size_t count = 0;
        check(gpu_ipc_pool_regions(get(), nullptr, 0, &count));
        std::vector<gpu_ipc_region> regions(count);
        check(gpu_ipc_pool_regions(get(), regions.data(), regions.size(), &count));
        return regions;
    }
    void write(const std::string &part, const void *bytes, size_t len, uint64_t offset = 0) const {
        check(gpu_ipc_pool_write(get(), part.c_str(), offset, bytes, len));
    }
    void read(const std::string &part, void *bytes, size_t len, uint64_t offset = 0) const {
        check(gpu_ipc_pool_read(get(), part.c_str(), offset, bytes, len));
    }
    void fill(const std::string &part, uint64_t offset, uint64_t len, uint8_t byte, const Stream &stream) const {
        check(gpu_ipc_pool_fill(get(), part.c_str(), offset, len, byte, stream.get()));
    }
    void used_on(const Stream &stream) const { check(gpu_ipc_pool_used_on(get(), stream.get())); }
    /// Gives a block's contents up: from here on it may be filled.
    void invalidate(uint32_t block) const { check(gpu_ipc_pool_invalidate(get(), block)); }
    /// Queues the seal of a block behind the work on a stream.
    void seal(uint32_t block, const gpu_ipc_key &key, const Stream &stream) const {
        check(gpu_ipc_pool_seal(get(), block, &key, stream.get()));
    }
    void seal(const std::vector<gpu_ipc_seal> &seals, const Stream &stream) const {
        check(gpu_ipc_pool_seal_many(get(), seals.data(), seals.size(), stream.get()));
    }
    /// The blocks that are whole at this moment.
    std::vector<gpu_ipc_sealed> sealed() const {
        return sealed_of([this](gpu_ipc_sealed *first, size_t capacity, size_t *count) {
            return gpu_ipc_pool_sealed(get(), first, capacity, count);
        });
    }
    /// Ends the hold behind the streams that were named, and waits until the broker has noted it.
    void end() { check(gpu_ipc_pool_end(release(), nullptr, 0)); }
    /// As above, behind one more stream.
    void end(const Stream &stream) {
        gpu_ipc_stream *more = stream.get();
        check(gpu_ipc_pool_end(release(), &more, 1));
    }
};

/// A pool that is read beside its holder.
class PoolReader : public Handle<gpu_ipc_pool_reader, gpu_ipc_pool_reader_close> {
public:
    using Handle::Handle;

    gpu_ipc_pool_info info() const {
        auto info = sized<gpu_ipc_pool_info>();
        check(gpu_ipc_pool_reader_get_info(get(), &info));
        return info;
    }
    /// The bytes of the user's own that lie beside the parts.
    std::vector<std::byte> user() const {
        std::vector<std::byte> bytes(static_cast<size_t>(info().user_len));
        check(gpu_ipc_pool_reader_user(get(), bytes.data(), bytes.size()));
        return bytes;
    }
    gpu_ipc_part part(const std::string &name) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_pool_reader_get_part(get(), name.c_str(), &part));
        return part;
    }
    gpu_ipc_part part(size_t number) const {
        auto part = sized<gpu_ipc_part>();
        check(gpu_ipc_pool_reader_get_part_at(get(), number, &part));
        return part;
    }
    void used_on(const Stream &stream) const { check(gpu_ipc_pool_reader_used_on(get(), stream.get())); }
    /// The blocks that are whole at this moment; the holder may give any of them up meanwhile.
    std::vector<gpu_ipc_sealed> sealed() const {
        return sealed_of([this](gpu_ipc_sealed *first, size_t capacity, size_t *count) {
            return gpu_ipc_pool_reader_sealed(get(), first, capacity, count);
        });
    }
    /// What a block holds; nothing if it is not whole at this moment.
    std::optional<gpu_ipc_sealed> look(uint32_t block) const {
        bool whole = false;
        gpu_ipc_sealed sealed{};
        check(gpu_ipc_pool_reader_look(get(), block, &whole, &sealed));
        return whole ? std::optional(sealed) : std::nullopt;
    }
    /// Whether a block was whole all along since the look.
    bool is_still(const gpu_ipc_sealed &sealed) const {
        bool still = false;
        check(gpu_ipc_pool_reader_is_still(get(), &sealed, &still));
        return still;
    }
    /// Copies a block that is whole, and says what it holds; nothing, and the bytes are of no use, if it is not or was given up
    /// meanwhile.
    std::optional<gpu_ipc_sealed> read_whole(uint32_t block, const std::string &part, void *bytes, size_t len,
                                             uint64_t offset) const {
        bool whole = false;
        gpu_ipc_sealed sealed{};
        check(gpu_ipc_pool_reader_read_whole(get(), block, part.c_str(), offset, bytes, len, &whole, &sealed));
        return whole ? std::optional(sealed) : std::nullopt;
    }
};

class Client : public Handle<gpu_ipc_client, gpu_ipc_client_close> {
public:
    using Handle::Handle;

    static Client connect(const Device &device, gpu_ipc_client_options options = sized<gpu_ipc_client_options>()) {
        gpu_ipc_client *client;
        check(gpu_ipc_client_connect(device.get(), &options, &client));
        return Client(client);
    }
    Writer create(const std::string &name, const std::vector<gpu_ipc_part_spec> &parts,
                  gpu_ipc_create_options options = sized<gpu_ipc_create_options>()) const {
        gpu_ipc_writer *writer;
        check(gpu_ipc_object_create(get(), name.c_str(), parts.data(), parts.size(), &options, &writer));
        return Writer(writer);
    }
    Scratch scratch(const std::string &name, const std::vector<gpu_ipc_part_spec> &parts) const {
        gpu_ipc_scratch *scratch;
        check(gpu_ipc_object_scratch(get(), name.c_str(), parts.data(), parts.size(), &scratch));
        return Scratch(scratch);
    }
    /// Makes a pool with a journal for so many blocks, and holds it.
    Pool create_pool(const std::string &name, const std::vector<gpu_ipc_part_spec> &parts, uint32_t blocks,
                     gpu_ipc_create_options options = sized<gpu_ipc_create_options>()) const {
        gpu_ipc_pool *pool;
        check(gpu_ipc_pool_create(get(), name.c_str(), parts.data(), parts.size(), gpu_ipc_journal_bytes(blocks), &options,
                                  &pool));
        return Pool(pool);
    }
    /// Holds a pool, with the bytes that its last holder left.
    Pool adopt(const std::string &name, bool at_same_addresses = false) const {
        gpu_ipc_pool *pool;
        check(gpu_ipc_pool_adopt(get(), name.c_str(), at_same_addresses, &pool));
        return Pool(pool);
    }
    /// Maps a pool read-only, beside its holder.
    PoolReader read_pool(const std::string &name) const {
        gpu_ipc_pool_reader *reader;
        check(gpu_ipc_pool_open(get(), name.c_str(), &reader));
        return PoolReader(reader);
    }
    Reader open(const std::string &name, uint64_t epoch = 0) const {
        gpu_ipc_reader *reader;
        check(gpu_ipc_object_open(get(), name.c_str(), epoch, &reader));
        return Reader(reader);
    }
    Reader open(const gpu_ipc_identity &identity) const {
        gpu_ipc_reader *reader;
        check(gpu_ipc_object_open_identity(get(), &identity, &reader));
        return Reader(reader);
    }
    /// The outcome of a commit, and the epoch of one that was committed.
    std::pair<Outcome, uint64_t> outcome(const gpu_ipc_identity &identity) const {
        uint32_t outcome = 0;
        uint64_t epoch = 0;
        check(gpu_ipc_object_outcome(get(), &identity, &outcome, &epoch));
        return {static_cast<Outcome>(outcome), epoch};
    }
    /// Waits for an epoch newer than `seen`; nothing when the time was over first.
    std::optional<uint64_t> watch(const std::string &name, uint64_t seen, std::chrono::nanoseconds timeout) const {
        uint64_t epoch = 0;
        int32_t code = gpu_ipc_object_watch(get(), name.c_str(), seen, timeout.count(), &epoch);
        if (code == GPU_IPC_DEADLINE) {
            return std::nullopt;
        }
        check(code);
        return epoch;
    }
    uint64_t remove(const std::string &name, uint64_t epoch = 0) const {
        uint64_t last = 0;
        check(gpu_ipc_object_remove(get(), name.c_str(), epoch, &last));
        return last;
    }
};

}  // namespace gpu_ipc

#endif  // GPU_IPC_HPP

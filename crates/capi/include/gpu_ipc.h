/* gpu_ipc.h: share GPU memory between processes without copying it. */

#if defined(__cplusplus) ? __cplusplus < 201103L : !defined(__STDC_VERSION__) || __STDC_VERSION__ < 199901L
#error "gpu_ipc.h needs C11 or C++11, or later: compile with -std=c11 or -std=c++11"
#else

// Written by cbindgen from crates/capi/src; docs/C.md goes through a first program.
//
// Handles. What a function opens is a handle: a number in the shape of a pointer, never to be followed. Every kind has a
// close, which takes null too. A handle that is null, closed, of another kind or of another library of the process gives
// GPU_IPC_BAD_HANDLE. (Each library draws a number that its handles carry. Of 1,023 pairs of libraries one pair draws the
// same: those two may take each other's handles for their own.) A handle may be closed while other threads are in calls
// with it: what it stands for goes with the last of them. In a forked child handles of the parent give GPU_IPC_FORKED, and
// nothing is done; the child opens its own.
//
// Errors. Functions return GPU_IPC_OK, which is 0, or a code; those that return a value return 0, null or -1 after an error
// unless they say otherwise. gpu_ipc_last_error_text and _remedy tell more of the last failure on the calling thread; as
// errno, they are as they were after a call that succeeds, and gpu_ipc_clear_error forgets them. Codes and numbers of kinds
// that this header does not list are legal: a later library may give them. After an error results are as they were, and
// handles null, unless a function says otherwise.
//
// Structures that begin with their size have it set by the caller: gpu_ipc_stats stats = {.size = sizeof stats}. Zero is the
// default of every option. A size that no version of the structure has is GPU_IPC_INVALID; a reserved field that is not zero
// is GPU_IPC_UNSUPPORTED, and so is what lies beyond the structure that the library knows.
//
// Times are nanoseconds: below 0 is for ever, 0 does not wait.
//
// Every function says what it keeps of what it is given, which threads may call it, whether it can block, and its errors.
// Any thread means several at once too. A failure inside the library is GPU_IPC_PANIC. What cannot be found out is a wrong
// address: a pointer that is not null must be good for what the function says of it. Nor may a thread be cancelled, or leave
// by longjmp, inside a call. No function may be called in a signal handler.
//
// Threads of the library block all signals but SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS and SIGTRAP. The dispositions and the
// masks of the program stay as they are, and no call raises SIGPIPE.
//
// Stack. A thread that calls needs 256 KiB of it, beside what a GPU's driver needs.
//
// Memory. GPU_IPC_OUT_OF_MEMORY is about memory for blocks, GPU_IPC_EXHAUSTED about limits and tables. When the process can
// get no memory for the library's own small objects (RLIMIT_AS, a control group without swap), it is aborted.
//
// Callbacks return: one that throws a C++ exception, or leaves by longjmp, aborts the process.


#ifndef GPU_IPC_H
#define GPU_IPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// In place of a number of claims: every participant that asks, as often as there are, as long as
// the block is not closed.
#define GPU_IPC_EVERYBODY 4294967295

// The bytes of a descriptor.
#define GPU_IPC_DESCRIPTOR_BYTES 192

// Shared memory instead of a GPU.
#define GPU_IPC_HOST 1

// NVIDIA, through the CUDA driver.
#define GPU_IPC_CUDA 2

// AMD, through the HIP runtime.
#define GPU_IPC_HIP 3

// What a function returns that did what it was asked for.
#define GPU_IPC_OK 0

// The device has no room: collect, drop blocks or trim, then try again.
#define GPU_IPC_OUT_OF_MEMORY 1

// A limit of the library or of the system is reached: raise it or hold less.
#define GPU_IPC_EXHAUSTED 2

// The library was built without that vendor.
#define GPU_IPC_NOT_COMPILED 3

// This machine cannot run that vendor's driver.
#define GPU_IPC_UNAVAILABLE 4

// This process does not see the device.
#define GPU_IPC_NO_DEVICE 5

// The device, the driver or the memory cannot do that.
#define GPU_IPC_UNSUPPORTED 6

// An argument is wrong: mend the call.
#define GPU_IPC_INVALID 7

// The bytes are no descriptor: send it whole and unchanged.
#define GPU_IPC_BAD_DESCRIPTOR 8

// Both sides are well, but do not belong together.
#define GPU_IPC_MISMATCH 9

// No process, or one that is not allowed, is at the other end.
#define GPU_IPC_CONNECT 10

// The producer or the broker refused.
#define GPU_IPC_REFUSED 11

// The producer is dead or has closed its session: connect to its successor.
#define GPU_IPC_PRODUCER_GONE 12

// The participant is dead or gone: share with one that is connected.
#define GPU_IPC_PARTICIPANT_GONE 13

// The handle belongs to the parent of this forked child: open an own one.
#define GPU_IPC_FORKED 14

// The stream is being captured into a graph.
#define GPU_IPC_CAPTURING 15

// The session is shutting down.
#define GPU_IPC_CLOSING 16

// The time was over first: ask again, nothing was lost.
#define GPU_IPC_DEADLINE 17

// A call of the driver failed.
#define GPU_IPC_DRIVER 18

// A call of the operating system failed.
#define GPU_IPC_SYSTEM 19

// The call would have to wait: try again when the descriptor is readable.
#define GPU_IPC_WOULD_BLOCK 101

// The producer took the grant back: have it shared again.
#define GPU_IPC_REVOKED 102

// The descriptor was claimed before, as often as it can be.
#define GPU_IPC_ALREADY_CLAIMED 103

// The lease ended long ago: have it shared again.
#define GPU_IPC_STALE 104

// The descriptor is for another participant.
#define GPU_IPC_NOT_ADDRESSEE 105

// There is no such object that this user may open.
#define GPU_IPC_NOT_FOUND 201

// The name has another epoch than was expected.
#define GPU_IPC_CONFLICT 202

// The broker went while the object was being filled.
#define GPU_IPC_WRITER_LOST 203

// The object was aborted before its commit.
#define GPU_IPC_ABORTED 204

// The two epochs have different layouts: nothing changed.
#define GPU_IPC_LAYOUT_DIFFERS 205

// The addresses of a reader are lost: open the object anew.
#define GPU_IPC_POISONED 206

// The reader sleeps: wake it first.
#define GPU_IPC_ASLEEP 207

// The handle is null, closed, of another kind, or another library's.
#define GPU_IPC_BAD_HANDLE 301

// The library failed inside: a bug of it. What was asked for may be done in part.
#define GPU_IPC_PANIC 302

// Errors.
#define GPU_IPC_LOG_ERROR 1

// Warnings too: blocks that are kept for ever, a session that ends while others hold blocks of it.
#define GPU_IPC_LOG_WARN 2

// What happens, too.
#define GPU_IPC_LOG_INFO 3

// What helps to find a bug of the library, too.
#define GPU_IPC_LOG_DEBUG 4

// There is no notice.
#define GPU_IPC_NOTICE_NONE 0

// Of a session: the participant is connected.
#define GPU_IPC_NOTICE_JOINED 1

// Of a session: the participant is gone, as `how` says, and holds nothing any more. The others and
// the session go on. `gpu_ipc_session_participant_name` still knows its name.
#define GPU_IPC_NOTICE_LEFT 2

// Of a session: the session itself failed, not a participant: its thread panicked, and nothing more
// can be shared.
#define GPU_IPC_NOTICE_FAILED 3

// Of a session: a `gpu_ipc_session_collect` returns adopted memory.
#define GPU_IPC_NOTICE_TOKENS_RETURNED 4

// Of both: what answered `DEADLINE` or `WOULD_BLOCK` without waiting may give another answer.
#define GPU_IPC_NOTICE_TRY_AGAIN 5

// Of a participant: the producer is dead or has closed its session; what is held stays readable.
#define GPU_IPC_NOTICE_PRODUCER_GONE 6

// Of a participant: the producer is closing its session; what was granted can still be claimed.
#define GPU_IPC_NOTICE_CLOSING 7

// Of a participant: the producer is short of memory and would like the region unmapped, which
// happens when no block of it is held.
#define GPU_IPC_NOTICE_PLEASE_UNMAP 8

// Of a participant: a grant was taken back before it was claimed.
#define GPU_IPC_NOTICE_REVOKED 9

// Something that this version has no number for.
#define GPU_IPC_NOTICE_OTHER 10

// It said goodbye: it was closed, or its program ended in order.
#define GPU_IPC_DEPARTURE_GOODBYE 1

// Its process has ended without a goodbye, which the kernel proves.
#define GPU_IPC_DEPARTURE_DIED 2

// Its connection has ended without a goodbye, and its process lives.
#define GPU_IPC_DEPARTURE_CONNECTION_LOST 3

// Nobody but the owner may open the object.
#define GPU_IPC_READERS_OWNER 0

// Every user that may connect to the broker may open the object, and so could write to it.
#define GPU_IPC_READERS_EVERYBODY 1

// The users of the list may open the object, and so could write to it.
#define GPU_IPC_READERS_UIDS 2

// The object became visible.
#define GPU_IPC_OUTCOME_COMMITTED 1

// The object is still being filled, or about to become visible.
#define GPU_IPC_OUTCOME_UNFINISHED 2

// No such object is known: it never became visible, or was removed long ago.
#define GPU_IPC_OUTCOME_UNKNOWN 3

// The most dimensions of a part.
#define GPU_IPC_MOST_RANK 32

// The bytes of a part's or object's name with its zero byte, at most.
#define GPU_IPC_NAME_BYTES 256

// A pool had no hold before this one.
#define GPU_IPC_PREVIOUS_NEVER 1

// The hold before this one was closed by its holder, behind its streams.
#define GPU_IPC_PREVIOUS_CLOSED 2

// The holder before this one died: a filling may have been under way.
#define GPU_IPC_PREVIOUS_DIED 3

// Wait for the producer's work on the calling thread, or queue the wait on the stream that is
// given.
#define GPU_IPC_WAIT 0

// Do not wait for the producer's work: ask `gpu_ipc_received_state`, or call
// `gpu_ipc_received_wait`.
#define GPU_IPC_NO_WAIT 1

// The producer's work on the block is not finished.
#define GPU_IPC_STATE_PENDING 1

// The contents are what the producer shared.
#define GPU_IPC_STATE_READY 2

// The contents are what the producer shared, and the producer is gone.
#define GPU_IPC_STATE_READY_PRODUCER_GONE 3

// The producer died or broke before its work was finished: the contents are garbage.
#define GPU_IPC_STATE_POISONED 4

// The version of this header: `1000000 * major + 1000 * minor + patch`.
#define GPU_IPC_VERSION (((GPU_IPC_VERSION_MAJOR * 1000000) + (GPU_IPC_VERSION_MINOR * 1000)) + GPU_IPC_VERSION_PATCH)

// Before 1 every minor version is another interface, with another soname.
#define GPU_IPC_VERSION_MAJOR 0

// Functions and fields may come.
#define GPU_IPC_VERSION_MINOR 3

// The interface is the same.
#define GPU_IPC_VERSION_PATCH 0

// A block that this process produces.
typedef struct gpu_ipc_block gpu_ipc_block;

// A connection to a broker of objects.
typedef struct gpu_ipc_client gpu_ipc_client;

// A device that memory lies on.
typedef struct gpu_ipc_device gpu_ipc_device;

// A block that is lent: shared any number of times until it is released.
typedef struct gpu_ipc_loan gpu_ipc_loan;

// A consumer's connection to a session.
typedef struct gpu_ipc_participant gpu_ipc_participant;

// A pool of a broker that this process holds.
typedef struct gpu_ipc_pool gpu_ipc_pool;

// A pool of a broker that is read beside its holder.
typedef struct gpu_ipc_pool_reader gpu_ipc_pool_reader;

// An object that is mapped.
typedef struct gpu_ipc_reader gpu_ipc_reader;

// A block that this process received.
typedef struct gpu_ipc_received gpu_ipc_received;

// Memory of a broker that goes with this process.
typedef struct gpu_ipc_scratch gpu_ipc_scratch;

// A producer's session.
typedef struct gpu_ipc_session gpu_ipc_session;

// A stream that sharing, claiming and releasing are ordered on.
typedef struct gpu_ipc_stream gpu_ipc_stream;

// An object that is being filled.
typedef struct gpu_ipc_writer gpu_ipc_writer;

// How a lease is granted; all zero is a good choice.
typedef struct gpu_ipc_share_options {
    // `sizeof(gpu_ipc_share_options)`.
    size_t size;
    // How long the grant can be claimed, in nanoseconds: 0 for what the session was opened with,
    // below 0 for ever.
    int64_t time_to_live_ns;
    // Bytes of the user's own that travel in the descriptor: shape, type, frame number.
    uint8_t user[64];
    // 1: the block is granted to be read only. The participant maps it so that a write faults, on a
    // GPU in a way that breaks the context, and what it forwards is read-only too. `UNSUPPORTED` for
    // memory that other processes open by a handle, and on a device that maps nothing read-only.
    uint32_t read_only;
    // Zero.
    uint32_t reserved;
} gpu_ipc_share_options;

// A grant of one block: plain bytes, which may be copied and sent by any transport.
typedef struct gpu_ipc_descriptor {
    // To send whole and unchanged.
    uint8_t bytes[GPU_IPC_DESCRIPTOR_BYTES];
} gpu_ipc_descriptor;

// One of several grants. All zero is a grant to no participant, which is refused.
typedef struct gpu_ipc_grant {
    // The block.
    struct gpu_ipc_block *block;
    // The participant's number; 0 for a ticket.
    uint64_t participant;
    // How often the ticket can be claimed, or `GPU_IPC_EVERYBODY`; 0 for a participant.
    uint32_t claims;
    // Zero.
    uint32_t reserved;
} gpu_ipc_grant;

// What a descriptor says. It says nothing about the grant, which may be revoked, claimed, or of
// another session.
typedef struct gpu_ipc_descriptor_info {
    // `sizeof(gpu_ipc_descriptor_info)`.
    size_t size;
    // Bytes of the block that it grants.
    uint64_t len;
    // The participant that alone can claim it; 0 for a ticket.
    uint64_t participant;
    // The session that granted it.
    uint8_t session[16];
    // Bytes of the user's own.
    uint8_t user[64];
} gpu_ipc_descriptor_info;

// What a device is.
typedef struct gpu_ipc_device_info {
    // `sizeof(gpu_ipc_device_info)`.
    size_t size;
    // `GPU_IPC_HOST`, `GPU_IPC_CUDA`, `GPU_IPC_HIP`, or a vendor of a later version.
    uint32_t backend;
    // The number under which this process sees it.
    uint32_t number;
    // The identity under which every process sees it.
    uint8_t uuid[16];
    // Bytes of device memory.
    uint64_t total_bytes;
    // The vendor's name for it, cut after 127 bytes.
    char name[128];
} gpu_ipc_device_info;

// Something that an application may want to know at once.
typedef struct gpu_ipc_notice {
    // `GPU_IPC_NOTICE_...`, or a number of a later version.
    uint32_t kind;
    // `GPU_IPC_DEPARTURE_...` of a participant that left, or a number of a later version; 0 for
    // others.
    uint32_t how;
    // The participant that joined or left, or the region to unmap; 0 for others.
    uint64_t number;
} gpu_ipc_notice;

// What a client connects with; all zero is a good choice.
typedef struct gpu_ipc_client_options {
    // `sizeof(gpu_ipc_client_options)`.
    size_t size;
    // The broker's directory; null for `$NVIDIA_DRA_LOCAL_IPC_DIR`, or `broker` in the runtime
    // directory.
    const char *dir;
    // What it calls itself, for people; null for nothing.
    const char *name;
    // How long a question may take, in nanoseconds; 0 for 60 seconds.
    uint64_t patience_ns;
} gpu_ipc_client_options;

// A part of an object that is to be made.
typedef struct gpu_ipc_part_spec {
    // Its name: 1 to 255 bytes of UTF-8, unique in its object.
    const char *name;
    // Elements along each dimension, the last one fastest; null with a rank of 0 for a scalar.
    const uint64_t *shape;
    // Elements from one to the next along each dimension; null when they lie close together.
    const uint64_t *strides;
    // How many dimensions there are, at most 32.
    uint32_t rank;
    // DLPack's type code of its elements: 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6
    // bool.
    uint8_t type_code;
    // Bits of one lane: 8 for bytes, 32 for float.
    uint8_t type_bits;
    // Lanes of one element; 0 stands for 1.
    uint16_t type_lanes;
} gpu_ipc_part_spec;

// How an object is made; all zero is a good choice.
typedef struct gpu_ipc_create_options {
    // `sizeof(gpu_ipc_create_options)`.
    size_t size;
    // Bytes of the user's own that lie beside the parts.
    const void *user;
    // How many they are.
    size_t user_len;
    // Users beside the owner that may open it, with `GPU_IPC_READERS_UIDS`.
    const uint32_t *uids;
    // How many they are, at most 16.
    size_t uid_count;
    // `GPU_IPC_READERS_...`.
    uint32_t readers;
    // 1 to refuse the commit unless the name's epoch is `expected`.
    uint32_t expect;
    // The epoch that the name must have with `expect`; 0 for a name that has none.
    uint64_t expected;
    // 1 to give the name's epochs up before memory is asked for, where there is no room for two.
    uint32_t replace;
    // Zero.
    uint32_t reserved;
    // The group of each part, as many as there are parts; null to lay all of them together. A
    // group has memory of its own, so that it can be taken over without the others. At most 16
    // groups, in the order of their numbers.
    const uint32_t *groups;
    // Names of parts that are as in the name's newest epoch: its memory is taken over, without a
    // copy, and may not be written to. All parts of a group or none, and each epoch with the same
    // groups.
    const char *const *unchanged;
    // How many they are.
    size_t unchanged_count;
} gpu_ipc_create_options;

// Identifies one object for ever, on every host.
typedef struct gpu_ipc_identity {
    // Random bits, drawn by its writer.
    uint8_t bytes[16];
} gpu_ipc_identity;

// What a pool is.
typedef struct gpu_ipc_pool_info {
    // `sizeof(gpu_ipc_pool_info)`.
    size_t size;
    // How often it was adopted: of a holder with this time, of a reader as it was opened.
    uint64_t generation;
    // Its identity, the same for every holder.
    struct gpu_ipc_identity identity;
    // How many parts it has.
    uint64_t part_count;
    // How many bytes of the user's own it has.
    uint64_t user_len;
    // How many blocks its journal has entries for.
    uint32_t blocks;
    // `GPU_IPC_PREVIOUS_...`; 0 of a reader, which has no hold.
    uint32_t previous;
    // Its name, with a zero byte behind.
    char name[GPU_IPC_NAME_BYTES];
} gpu_ipc_pool_info;

// A part of an object that is there.
typedef struct gpu_ipc_part {
    // `sizeof(gpu_ipc_part)`.
    size_t size;
    // The address of its first byte in this process.
    void *ptr;
    // Its bytes.
    uint64_t len;
    // How many dimensions it has.
    uint32_t rank;
    // DLPack's type code of its elements.
    uint8_t type_code;
    // Bits of one lane.
    uint8_t type_bits;
    // Lanes of one element.
    uint16_t type_lanes;
    // Elements along each dimension.
    uint64_t shape[GPU_IPC_MOST_RANK];
    // Elements from one to the next along each dimension.
    uint64_t strides[GPU_IPC_MOST_RANK];
    // Its name, with a zero byte behind.
    char name[GPU_IPC_NAME_BYTES];
} gpu_ipc_part;

// The address and the bytes of a region.
typedef struct gpu_ipc_region {
    // The address of its first byte in this process.
    void *ptr;
    // Its bytes, as its parts fill them.
    uint64_t len;
} gpu_ipc_region;

// What the application calls the contents of a block.
typedef struct gpu_ipc_key {
    // Bytes of the application's own, such as a digest.
    uint8_t bytes[16];
} gpu_ipc_key;

// A block that is to be sealed.
typedef struct gpu_ipc_seal {
    // What its contents are called.
    struct gpu_ipc_key key;
    // Its number.
    uint32_t block;
} gpu_ipc_seal;

// A block whose contents are whole.
typedef struct gpu_ipc_sealed {
    // What its contents are called.
    struct gpu_ipc_key key;
    // Its number.
    uint32_t block;
    // How often it was given up before its contents were written; 1 for the first.
    uint32_t generation;
} gpu_ipc_sealed;

// What a reader has mapped.
typedef struct gpu_ipc_reader_info {
    // `sizeof(gpu_ipc_reader_info)`.
    size_t size;
    // The epoch that the addresses reach.
    uint64_t epoch;
    // The identity of the object that they reach.
    struct gpu_ipc_identity identity;
    // How many parts it has.
    uint64_t part_count;
    // How many bytes of the user's own it has; `gpu_ipc_reader_user` copies them.
    uint64_t user_len;
    // 1 while the reader sleeps.
    uint32_t asleep;
    // Zero.
    uint32_t reserved;
    // The object's name, with a zero byte behind.
    char name[GPU_IPC_NAME_BYTES];
} gpu_ipc_reader_info;

// What a participant connects with; all zero is a good choice.
typedef struct gpu_ipc_connect_options {
    // `sizeof(gpu_ipc_connect_options)`.
    size_t size;
    // What it calls itself, for people; null for the command that this process runs. 32 bytes
    // count.
    const char *name;
    // How long to wait for the producer's welcome, in nanoseconds: 0 for 30 seconds, below 0 for
    // ever.
    int64_t timeout_ns;
    // The most bytes that stay mapped without being used; 0 for as many as the device has.
    uint64_t cache_bytes;
    // The most regions that stay mapped without being used; 0 for 1,024.
    uint64_t cache_regions;
    // 1 to map memory so that a write faults; `UNSUPPORTED` where the device cannot.
    uint32_t read_only;
    // Zero.
    uint32_t reserved;
    // How long to wait for a producer that does not listen yet, in nanoseconds: 0 not at all,
    // below 0 for ever. `gpu_ipc_connect` alone.
    int64_t wait_for_producer_ns;
} gpu_ipc_connect_options;

// What a session is opened with; all zero is a good choice.
typedef struct gpu_ipc_session_options {
    // `sizeof(gpu_ipc_session_options)`.
    size_t size;
    // The path to listen on; null for one in the runtime directory of this user.
    const char *socket;
    // Users that may connect besides this process' own.
    const uint32_t *uids;
    // How many they are.
    size_t uid_count;
    // Bytes of a region of the session's own memory; 0 for 32 MiB.
    uint64_t region_bytes;
    // How long a grant can be claimed, in nanoseconds: 0 for 5 minutes, below 0 for ever.
    int64_t time_to_live_ns;
    // How long after the proof of a participant's death its blocks are kept from reuse, in
    // nanoseconds; 0 for 100 ms.
    uint64_t quarantine_ns;
    // The most leases of one participant, at least 8,192; 0 for 2,097,152.
    uint64_t max_leases;
    // Not 0: the session's own memory grows in place where the device can, so that blocks lie
    // across regions.
    uint64_t grows_in_place;
} gpu_ipc_session_options;

// A function that the library calls with the context that came with it.
typedef void (*gpu_ipc_callback)(void *context);

// What a collect found.
typedef struct gpu_ipc_collected {
    // `sizeof(gpu_ipc_collected)`.
    size_t size;
    // Blocks that nothing holds any more, adopted ones among them.
    uint64_t blocks;
    // Their bytes.
    uint64_t bytes;
    // Of those, adopted ones that were returned.
    uint64_t returned;
} gpu_ipc_collected;

// A session at one moment. Numbers are of blocks unless they say bytes.
typedef struct gpu_ipc_stats {
    // `sizeof(gpu_ipc_stats)`.
    size_t size;
    // Blocks that exist: with the producer, shared, or in limbo.
    uint64_t live_blocks;
    // Their bytes.
    uint64_t live_bytes;
    // Blocks that the producer dropped and something still holds.
    uint64_t limbo_blocks;
    // Their bytes.
    uint64_t limbo_bytes;
    // Leases granted and not claimed.
    uint64_t in_flight;
    // Leases claimed and not seen released.
    uint64_t held;
    // Leases of participants that are dead or gone, until proof and quarantine are over.
    uint64_t quarantined;
    // Bytes of the blocks behind those.
    uint64_t quarantined_bytes;
    // Leases whose word in shared memory makes no sense: their blocks are barred until the
    // holder's death.
    uint64_t poisoned;
    // Blocks that are never used again, because nobody can say when the work on them ends.
    uint64_t leaked_blocks;
    // Their bytes.
    uint64_t leaked_bytes;
    // Grants taken back by cancel, by the addressee's death or by its goodbye, so far.
    uint64_t revoked;
    // Grants taken back because nobody claimed them in time, so far.
    uint64_t expired;
    // Participants that died with leases or mappings, so far.
    uint64_t deaths;
    // Words found corrupt so far.
    uint64_t corrupt_words;
    // Tickets that can still be claimed.
    uint64_t tickets;
    // Participants that are connected, or dead and not buried yet.
    uint64_t participants;
    // Regions of the session's memory.
    uint64_t regions;
    // Bytes taken from the driver.
    uint64_t reserved_bytes;
    // Bytes handed out.
    uint64_t in_use_bytes;
    // Bytes in regions that other processes may have mapped.
    uint64_t pinned_bytes;
    // Of the blocks in limbo, those that wait for streams on which no event could be recorded: a
    // thread synchronises these.
    uint64_t unmarked_blocks;
} gpu_ipc_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Grants a lease on a block to one participant, and writes the descriptor by which it is claimed:
// plain bytes for any transport.
//
// The contents may be read after what is queued on `after` at this moment; null says that all work
// on the block is done. `options` may be null.
//
// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
// `PARTICIPANT_GONE`, `CLOSING`, `FORKED`, `CAPTURING`, `MISMATCH` for a stream of another device,
// `EXHAUSTED`, `DRIVER`. After an error nothing is granted.
//
// Caller: `options` is null, or has as many bytes as its `size` says.
int32_t gpu_ipc_share(struct gpu_ipc_block *block,
                      uint64_t participant,
                      struct gpu_ipc_stream *after,
                      const struct gpu_ipc_share_options *options,
                      struct gpu_ipc_descriptor *descriptor);

// Grants leases on a block to the first that ask: a ticket that can be claimed `claims` times,
// each time by another participant; with `GPU_IPC_EVERYBODY` by all, as long as the block is not
// closed.
//
// Otherwise as `gpu_ipc_share`. Each claim asks the producer.
//
// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: as `gpu_ipc_share`,
// and `INVALID` for 0 claims.
//
// Caller: `options` is null, or has as many bytes as its `size` says.
int32_t gpu_ipc_share_ticket(struct gpu_ipc_block *block,
                             uint32_t claims,
                             struct gpu_ipc_stream *after,
                             const struct gpu_ipc_share_options *options,
                             struct gpu_ipc_descriptor *descriptor);

// Shares several blocks of a session after the same work, each with the participant that it names:
// one fence for each participant. The descriptors come in the order of the grants.
//
// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: as `gpu_ipc_share`,
// `MISMATCH` for a block of another session, and `INVALID` for a grant to no participant. After an
// error nothing is granted.
//
// Caller: There are `count` grants, and room for as many descriptors; `options` is null, or has as many
// bytes as its `size` says.
int32_t gpu_ipc_share_many(struct gpu_ipc_session *session,
                           const struct gpu_ipc_grant *grants,
                           size_t count,
                           struct gpu_ipc_stream *after,
                           const struct gpu_ipc_share_options *options,
                           struct gpu_ipc_descriptor *descriptors);

// Takes back an unclaimed grant of the block, as `gpu_ipc_session_revoke` does; `cancelled` says
// whether there was something, and may be null.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `BAD_DESCRIPTOR`, `MISMATCH` for
// one of another session or block, `FORKED`.
int32_t gpu_ipc_block_cancel(struct gpu_ipc_block *block, const struct gpu_ipc_descriptor *descriptor, bool *cancelled);

// Returns the address of a block's first byte in this process; null after an error. On the host
// backend the CPU may use it.
//
// Streams whose queued work touches the block are named with `gpu_ipc_block_used_on` before it is
// closed, unless the block was shared after that work.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
void *gpu_ipc_block_ptr(struct gpu_ipc_block *block);

// Returns a block's bytes; 0 after an error.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
uint64_t gpu_ipc_block_len(struct gpu_ipc_block *block);

// Names a stream of this process whose queued work touches the block: it is not used again before
// that is done.
//
// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
// `INVALID` for the per-thread default stream, `FORKED`.
int32_t gpu_ipc_block_used_on(struct gpu_ipc_block *block, struct gpu_ipc_stream *stream);

// Waits until no lease on the block is outstanding, so that it can be written again. With 0 it
// asks; when the answer is no, the session's notice `GPU_IPC_NOTICE_TRY_AGAIN` says when to ask
// again.
//
// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
// `DEADLINE`, `FORKED`.
int32_t gpu_ipc_block_wait_released(struct gpu_ipc_block *block, int64_t timeout_ns);

// Counts the leases that are granted or held; `SIZE_MAX` after an error, so that a block is not
// taken for free. A ticket that can still be claimed counts as one, an unlimited one as none.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
size_t gpu_ipc_block_outstanding(struct gpu_ipc_block *block);

// Copies `len` bytes into a block from `offset` on, after the work that is queued on the stream.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the block's end, `MISMATCH` for a stream of another device, `CAPTURING`,
// `DRIVER`.
//
// Caller: There are `len` bytes.
int32_t gpu_ipc_block_write(struct gpu_ipc_block *block,
                            uint64_t offset,
                            const void *bytes,
                            size_t len,
                            struct gpu_ipc_stream *stream);

// Copies `len` bytes of a block from `offset` on to the host, after the work that is queued on the
// stream.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: as
// `gpu_ipc_block_write`; then the bytes are as they were.
//
// Caller: There is room for `len` bytes.
int32_t gpu_ipc_block_read(struct gpu_ipc_block *block,
                           uint64_t offset,
                           void *bytes,
                           size_t len,
                           struct gpu_ipc_stream *stream);

// Closes a block: nobody can be granted a lease on it any more. It is given back when its last
// lease has ended and the work on it is done. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_block_close(struct gpu_ipc_block *block);

// Reads what a descriptor says, of bytes that somebody sent.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_DESCRIPTOR` naming the first field that is
// wrong, `MISMATCH` for another version, `INVALID`.
//
// Caller: There are `len` bytes; `info` has as many bytes as its `size` says.
int32_t gpu_ipc_descriptor_get_info(const void *bytes, size_t len, struct gpu_ipc_descriptor_info *info);

// Finds the devices that this process can use, GPUs first, and opens each.
//
// Writes as many handles as fit into `capacity` and the number of all to `count`. Loads every
// vendor's driver that there is. `gpu_ipc_device_open` says of a vendor that is missing why.
//
// Keeps: nothing; the handles are the caller's to close. Thread: any. Blocks: while drivers start,
// up to seconds. Errors: `INVALID`, `EXHAUSTED`.
//
// Caller: `devices` has room for `capacity` handles, or is null and `capacity` 0.
int32_t gpu_ipc_detect(struct gpu_ipc_device **devices, size_t capacity, size_t *count);

// Opens a device by its vendor and number; vendor 0 is the first that there is, GPUs first.
//
// Loads that vendor's driver alone.
//
// Keeps: nothing. Thread: any. Blocks: while the driver starts, up to seconds. Errors:
// `NOT_COMPILED`, `UNAVAILABLE` with the reason, `INVALID`, `DRIVER`.
int32_t gpu_ipc_device_open(uint32_t backend, uint32_t number, struct gpu_ipc_device **device);

// Fills in a device's properties.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `info` has as many bytes as its `size` says.
int32_t gpu_ipc_device_get_info(struct gpu_ipc_device *device, struct gpu_ipc_device_info *info);

// Closes a device; sessions, participants and streams that were opened with it go on. Null is
// passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_device_close(struct gpu_ipc_device *device);

// Returns the code of the last call that failed on this thread; 0 when none has since
// `gpu_ipc_clear_error`. As `errno` it is not touched by a call that succeeds.
//
// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
int32_t gpu_ipc_last_error(void);

// Forgets the last failure of this thread: the code is 0 and both texts are empty until the next
// call that fails. For calls that return a value, where that alone does not say whether they
// failed.
//
// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
void gpu_ipc_clear_error(void);

// Returns what the last call that failed on this thread says: both sides of what differs, and the
// cause.
//
// The text is UTF-8, never null, cut after 4,095 bytes, and at one address until the thread's end:
// the next call on this thread that fails writes over it.
//
// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
const char *gpu_ipc_last_error_text(void);

// Returns what to do about the last call that failed on this thread; empty where there is nothing.
//
// The text is UTF-8, never null, cut after 1,023 bytes, and at one address until the thread's end:
// the next call on this thread that fails writes over it.
//
// Keeps: nothing. Thread: any; each has its own. Blocks: no. Errors: none.
const char *gpu_ipc_last_error_remedy(void);

// Returns a code's name, a few words that stay the same in every version; "unknown" for a code of
// a later version.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: none.
const char *gpu_ipc_error_name(int32_t code);

// Lends a block: until the loan is released it is shared any number of times, with any addressee.
// The contents may be read after what is queued on `after` at this moment, which is marked once;
// null says that all work on the block is done.
//
// The block may be closed: the loan keeps its memory. On the block a loan counts as one lease, with
// all that was shared from it.
//
// Keeps: the block's memory, and the stream until that work is done. Thread: any. Blocks: no.
// Errors: `BAD_HANDLE`, `CLOSING`, `FORKED`, `CAPTURING`, `MISMATCH` for a stream of another
// device, `DRIVER`.
int32_t gpu_ipc_lend(struct gpu_ipc_block *block, struct gpu_ipc_stream *after, struct gpu_ipc_loan **loan);

// Grants a lease on what is lent to one participant, as `gpu_ipc_share` does.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: as `gpu_ipc_share`, and `INVALID` for a loan
// that was released.
//
// Caller: `options` is null, or has as many bytes as its `size` says.
int32_t gpu_ipc_loan_share(struct gpu_ipc_loan *loan,
                           uint64_t participant,
                           const struct gpu_ipc_share_options *options,
                           struct gpu_ipc_descriptor *descriptor);

// Grants leases on what is lent to the first that ask, as `gpu_ipc_share_ticket` does. A ticket for
// `GPU_IPC_EVERYBODY` is a broadcast: every participant claims it as often as it likes until the
// loan is released. No time to live ends a broadcast of a loan unless `options` ask for one.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: as `gpu_ipc_loan_share`.
//
// Caller: `options` is null, or has as many bytes as its `size` says.
int32_t gpu_ipc_loan_share_ticket(struct gpu_ipc_loan *loan,
                                  uint32_t claims,
                                  const struct gpu_ipc_share_options *options,
                                  struct gpu_ipc_descriptor *descriptor);

// Counts the leases of a loan that are granted or held, as `gpu_ipc_block_outstanding` does: 0
// once it is released, `SIZE_MAX` after an error.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
size_t gpu_ipc_loan_outstanding(struct gpu_ipc_loan *loan);

// Ends a loan: it can be shared no more, its broadcasts end, and what they granted and is unclaimed
// is taken back. What is held stays good for its holders. A second release does nothing.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_loan_release(struct gpu_ipc_loan *loan);

// Waits until the loan is released, by this thread or another, and nothing holds or can claim what
// was lent, so that it can be written again.
//
// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
// `DEADLINE`, `FORKED`.
int32_t gpu_ipc_loan_wait_released(struct gpu_ipc_loan *loan, int64_t timeout_ns);

// Releases a loan, and closes it. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_loan_close(struct gpu_ipc_loan *loan);

// Takes back what a descriptor of the session grants and is unclaimed; `revoked` says whether there
// was something, and may be null. When a claim comes at the same moment, one of the two wins.
//
// A ticket loses the claims that are left, and what it granted and is unclaimed. Leases that were
// claimed stay.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `BAD_DESCRIPTOR`, `MISMATCH` for
// one of another session, `FORKED`.
int32_t gpu_ipc_session_revoke(struct gpu_ipc_session *session,
                               const struct gpu_ipc_descriptor *descriptor,
                               bool *revoked);

// Writes the library's log to a descriptor, a line each: 2 for standard error, below 0 for nowhere
// (the default). `level` is `GPU_IPC_LOG_...`.
//
// A pipe or socket whose reader has gone loses the lines and raises no SIGPIPE.
//
// Keeps: nothing; the library has a copy of its own. Thread: any. Blocks: no; later a full
// descriptor blocks the thread that logs. Errors: `INVALID`, `SYSTEM`.
//
// Caller: `fd` is below 0, or open, and nobody closes it during the call.
int32_t gpu_ipc_log_to(int fd, uint32_t level);

// Takes the oldest notice of a session that was not read yet; `GPU_IPC_NOTICE_NONE` when there is
// none. While there is one, `gpu_ipc_session_fd` is readable; an event loop that tells of changes
// only reads until there is none.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_session_next_notice(struct gpu_ipc_session *session, struct gpu_ipc_notice *notice);

// Takes the oldest notice of a participant that was not read yet; `GPU_IPC_NOTICE_NONE` when there
// is none. While there is one, `gpu_ipc_participant_fd` is readable; an event loop that tells of
// changes only reads until there is none.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_participant_next_notice(struct gpu_ipc_participant *participant, struct gpu_ipc_notice *notice);

// Connects to a broker of objects, for objects on a device. It reconnects by itself when the
// broker was started again.
//
// Keeps: nothing; texts are copied. Thread: any. Blocks: for the broker's welcome. Errors:
// `BAD_HANDLE`, `CONNECT`, `REFUSED`, `INVALID`, `UNSUPPORTED`.
//
// Caller: `options` is null, or has as many bytes as its `size` says and good pointers in them.
int32_t gpu_ipc_client_connect(struct gpu_ipc_device *device,
                               const struct gpu_ipc_client_options *options,
                               struct gpu_ipc_client **client);

// Makes an object to be filled: all its memory is there, readable and writable by this process
// alone. Nobody sees it before `gpu_ipc_writer_commit`.
//
// Keeps: nothing; what describes the parts is copied. Thread: any. Blocks: for the broker, which
// may scrub memory first. Errors: `BAD_HANDLE`, `OUT_OF_MEMORY`, `REFUSED` for a limit, a name of
// another user, or parts that are not as in the newest epoch, `NOT_FOUND` where there is none,
// `INVALID`, `WRITER_LOST`, `DEADLINE`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there are `count` parts with good pointers in them; `options` is
// null, or has as many bytes as its `size` says and good pointers in them.
int32_t gpu_ipc_object_create(struct gpu_ipc_client *client,
                              const char *name,
                              const struct gpu_ipc_part_spec *parts,
                              size_t count,
                              const struct gpu_ipc_create_options *options,
                              struct gpu_ipc_writer **writer);

// Maps an object read-only: an epoch of a name, 0 for the newest.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
// `REFUSED`, `MISMATCH` for one of another device, `INVALID`, `DEADLINE`, `FORKED`.
//
// Caller: `name` ends with a zero byte.
int32_t gpu_ipc_object_open(struct gpu_ipc_client *client,
                            const char *name,
                            uint64_t epoch,
                            struct gpu_ipc_reader **reader);

// Maps the object of an identity read-only.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: as `gpu_ipc_object_open`.
int32_t gpu_ipc_object_open_identity(struct gpu_ipc_client *client,
                                     const struct gpu_ipc_identity *identity,
                                     struct gpu_ipc_reader **reader);

// Waits until a name has an epoch newer than `seen`, and says which.
//
// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
// `DEADLINE`, `REFUSED`, `INVALID`.
//
// Caller: `name` ends with a zero byte.
int32_t gpu_ipc_object_watch(struct gpu_ipc_client *client,
                             const char *name,
                             uint64_t seen,
                             int64_t timeout_ns,
                             uint64_t *epoch);

// Removes an epoch of a name, with 0 all; a process that has one mapped keeps it. `last` gets the
// last epoch that the name had, and may be null.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
// `REFUSED` for another user's, `INVALID`, `DEADLINE`.
//
// Caller: `name` ends with a zero byte.
int32_t gpu_ipc_object_remove(struct gpu_ipc_client *client, const char *name, uint64_t epoch, uint64_t *last);

// Asks for the outcome of a commit, by the identity of its object: `GPU_IPC_OUTCOME_...`. `epoch`
// gets the epoch of one that was committed, else 0, and may be null.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `DEADLINE`,
// `INVALID`.
int32_t gpu_ipc_object_outcome(struct gpu_ipc_client *client,
                               const struct gpu_ipc_identity *identity,
                               uint32_t *outcome,
                               uint64_t *epoch);

// Closes a client; its writers and readers go on. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_client_close(struct gpu_ipc_client *client);

// Makes a pool, memory that stays writable and outlives its holder, and holds it. Of the options
// `user`, `uids`, `readers` and `groups` are for pools, groups at most 15.
//
// Contents come in blocks, whatever the application calls so. A block is given up by
// `gpu_ipc_pool_invalidate`, then filled by work on streams, then sealed behind that work by
// `gpu_ipc_pool_seal`. What is sealed is whole, and `gpu_ipc_pool_sealed` lists it, also for the
// next holder after this process died. `journal_bytes` is what `gpu_ipc_journal_bytes` says.
//
// Keeps: nothing; what describes the parts is copied. Thread: any. Blocks: for the broker, which
// may scrub memory first. Errors: `BAD_HANDLE`, `OUT_OF_MEMORY`, `REFUSED` for a limit and for a
// name that is there already, `INVALID`, `DEADLINE`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there are `count` parts with good pointers in them; `options` is
// null, or has as many bytes as its `size` says and good pointers in them.
int32_t gpu_ipc_pool_create(struct gpu_ipc_client *client,
                            const char *name,
                            const struct gpu_ipc_part_spec *parts,
                            size_t count,
                            uint64_t journal_bytes,
                            const struct gpu_ipc_create_options *options,
                            struct gpu_ipc_pool **pool);

// Holds a pool: maps it writable, with the bytes that its last holder left. With
// `at_same_addresses` where that one had it, so that pointers in it stay good.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
// `REFUSED` while another process holds it, with the names of both, and for another user's;
// `INVALID` when the same addresses are in use here; `MISMATCH`, `DEADLINE`, `FORKED`.
//
// Caller: `name` ends with a zero byte.
int32_t gpu_ipc_pool_adopt(struct gpu_ipc_client *client,
                           const char *name,
                           bool at_same_addresses,
                           struct gpu_ipc_pool **pool);

// Describes a pool that this process holds.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `info` has as many bytes as its `size` says.
int32_t gpu_ipc_pool_get_info(struct gpu_ipc_pool *pool, struct gpu_ipc_pool_info *info);

// Copies the bytes that were put beside the parts when the pool was made; as many as fit into
// `capacity`.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: There is room for `capacity` bytes.
int32_t gpu_ipc_pool_user(struct gpu_ipc_pool *pool, void *bytes, size_t capacity);

// Describes a part and its address. The GPU, and on the host backend the CPU, may write there
// until the hold ends.
//
// Work on it is named by a seal, by `gpu_ipc_pool_used_on` or at `gpu_ipc_pool_end`: work on a
// stream that was not named, and that is not finished when the hold ends, is undefined behaviour.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `name` ends with a zero byte; `part` has as many bytes as its `size` says.
int32_t gpu_ipc_pool_get_part(struct gpu_ipc_pool *pool, const char *name, struct gpu_ipc_part *part);

// Describes a part by its number: from 0 to below the count of parts, in the order of their names.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `part` has as many bytes as its `size` says.
int32_t gpu_ipc_pool_get_part_at(struct gpu_ipc_pool *pool, size_t number, struct gpu_ipc_part *part);

// Lists the regions, in which all parts lie: as many as fit into `capacity`, and how many there
// are.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `regions` has room for `capacity` of them, or is null and `capacity` 0.
int32_t gpu_ipc_pool_regions(struct gpu_ipc_pool *pool, struct gpu_ipc_region *regions, size_t capacity, size_t *count);

// Copies `len` bytes from the host into a part from `offset` on.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there are `len` bytes.
int32_t gpu_ipc_pool_write(struct gpu_ipc_pool *pool, const char *name, uint64_t offset, const void *bytes, size_t len);

// Copies `len` bytes of a part from `offset` on to the host.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there is room for `len` bytes.
int32_t gpu_ipc_pool_read(struct gpu_ipc_pool *pool, const char *name, uint64_t offset, void *bytes, size_t len);

// Queues a fill: sets `len` bytes of a part from `offset` on to `byte`, after the work that is
// queued on the stream.
//
// Keeps: the stream, until the hold ends. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`
// beyond the part's end, `MISMATCH` for a stream of another device, `CAPTURING`, `DRIVER`,
// `FORKED`.
//
// Caller: `name` ends with a zero byte.
int32_t gpu_ipc_pool_fill(struct gpu_ipc_pool *pool,
                          const char *name,
                          uint64_t offset,
                          uint64_t len,
                          uint8_t byte,
                          struct gpu_ipc_stream *stream);

// Names a stream whose work touches the pool: the end of the hold waits for it.
//
// Keeps: the stream, until the hold ends. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
// `MISMATCH` for a stream of another device, `FORKED`.
int32_t gpu_ipc_pool_used_on(struct gpu_ipc_pool *pool, struct gpu_ipc_stream *stream);

// Gives a block's contents up: from here on it may be filled. To be called before the filling is
// queued.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` for a block that the
// journal has no entry for, `EXHAUSTED` for one that was given up 2^32 - 1 times, `FORKED`.
int32_t gpu_ipc_pool_invalidate(struct gpu_ipc_pool *pool, uint32_t block);

// Queues the seal of a block behind the work on a stream: once that has finished, the block is
// whole, and listed under its key.
//
// Keeps: the stream, until the hold ends. Thread: any. Blocks: no; until the stream is done on a
// device whose streams write no words. Errors: as `gpu_ipc_pool_seal_many`.
int32_t gpu_ipc_pool_seal(struct gpu_ipc_pool *pool,
                          uint32_t block,
                          const struct gpu_ipc_key *key,
                          struct gpu_ipc_stream *stream);

// Queues the seals of many blocks in one batch, as `gpu_ipc_pool_seal` does for one.
//
// Keeps: the stream, until the hold ends. Thread: any. Blocks: as `gpu_ipc_pool_seal`. Errors:
// `BAD_HANDLE`; `INVALID` for a block that was not invalidated since its last seal, is named twice
// or has no entry, `MISMATCH` for a stream of another device, `CAPTURING`: then none is sealed;
// `DRIVER`: then some may be; `FORKED`.
//
// Caller: There are `count` seals.
int32_t gpu_ipc_pool_seal_many(struct gpu_ipc_pool *pool,
                               const struct gpu_ipc_seal *seals,
                               size_t count,
                               struct gpu_ipc_stream *stream);

// Lists the blocks that are whole at this moment, in the order of their numbers: as many as fit
// into `capacity`, and how many there are.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`, `FORKED`.
//
// Caller: `sealed` has room for `capacity` of them, or is null and `capacity` 0.
int32_t gpu_ipc_pool_sealed(struct gpu_ipc_pool *pool, struct gpu_ipc_sealed *sealed, size_t capacity, size_t *count);

// Ends the hold: waits for these streams and those that were named before, and until the broker has
// noted it. Then another process may adopt the pool. Null is passed over.
//
// The handle is closed, whatever the call returns.
//
// Keeps: nothing. Thread: any. Blocks: for the streams and the broker. Errors: `BAD_HANDLE`;
// `CAPTURING`, `MISMATCH` and `DRIVER` for a stream whose work cannot be waited for: the hold ends
// with this process; `INVALID` while another call is in the pool, at whose end the hold ends as
// after `gpu_ipc_pool_close`; `DEADLINE` while the broker is away, which is told when it is back;
// `FORKED`.
//
// Caller: There are `count` streams.
int32_t gpu_ipc_pool_end(struct gpu_ipc_pool *pool, struct gpu_ipc_stream *const *streams, size_t count);

// Closes a pool: the hold ends when the work on the named streams is done. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_pool_close(struct gpu_ipc_pool *pool);

// Maps a pool read-only, beside a holder that may write to it at any time.
//
// What is read is a block's contents only if the block was whole before and after:
// `gpu_ipc_pool_reader_read_whole` does both looks. Work on a stream is put between
// `gpu_ipc_pool_reader_look` and `_is_still`, with a wait for it. `gpu_ipc_object_watch` of the
// name, from the reader's generation on, waits for the next holder.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND`,
// `REFUSED`, `MISMATCH`, `INVALID`, `DEADLINE`, `FORKED`.
//
// Caller: `name` ends with a zero byte.
int32_t gpu_ipc_pool_open(struct gpu_ipc_client *client, const char *name, struct gpu_ipc_pool_reader **reader);

// Describes a pool that is read.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `info` has as many bytes as its `size` says.
int32_t gpu_ipc_pool_reader_get_info(struct gpu_ipc_pool_reader *reader, struct gpu_ipc_pool_info *info);

// Copies the bytes that were put beside the parts when the pool was made; as many as fit into
// `capacity`.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: There is room for `capacity` bytes.
int32_t gpu_ipc_pool_reader_user(struct gpu_ipc_pool_reader *reader, void *bytes, size_t capacity);

// Describes a part and its address, which may be read alone: a kernel that writes there ends its
// context. Work on it is named with `gpu_ipc_pool_reader_used_on`.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `name` ends with a zero byte; `part` has as many bytes as its `size` says.
int32_t gpu_ipc_pool_reader_get_part(struct gpu_ipc_pool_reader *reader, const char *name, struct gpu_ipc_part *part);

// Describes a part by its number: from 0 to below the count of parts, in the order of their names.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `part` has as many bytes as its `size` says.
int32_t gpu_ipc_pool_reader_get_part_at(struct gpu_ipc_pool_reader *reader, size_t number, struct gpu_ipc_part *part);

// Names a stream whose work touches the pool: the mapping stays until that is done.
//
// Keeps: the stream, until the reader is closed. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
// `MISMATCH` for a stream of another device, `FORKED`.
int32_t gpu_ipc_pool_reader_used_on(struct gpu_ipc_pool_reader *reader, struct gpu_ipc_stream *stream);

// Lists the blocks that are whole at this moment, in the order of their numbers: as many as fit
// into `capacity`, and how many there are. The holder may give any of them up meanwhile.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `sealed` has room for `capacity` of them, or is null and `capacity` 0.
int32_t gpu_ipc_pool_reader_sealed(struct gpu_ipc_pool_reader *reader,
                                   struct gpu_ipc_sealed *sealed,
                                   size_t capacity,
                                   size_t *count);

// Says whether a block is whole at this moment, and then what it holds.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
int32_t gpu_ipc_pool_reader_look(struct gpu_ipc_pool_reader *reader,
                                 uint32_t block,
                                 bool *whole,
                                 struct gpu_ipc_sealed *sealed);

// Says whether a block was whole all along since the look: what was copied from it between is what
// the look found.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
int32_t gpu_ipc_pool_reader_is_still(struct gpu_ipc_pool_reader *reader,
                                     const struct gpu_ipc_sealed *sealed,
                                     bool *still);

// Copies `len` bytes of a block that is whole, from `offset` of a part on, to the host, and says
// what the block holds. `whole` is false where it is not whole, or the holder gave it up meanwhile:
// then the bytes are of no use.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there is room for `len` bytes.
int32_t gpu_ipc_pool_reader_read_whole(struct gpu_ipc_pool_reader *reader,
                                       uint32_t block,
                                       const char *name,
                                       uint64_t offset,
                                       void *bytes,
                                       size_t len,
                                       bool *whole,
                                       struct gpu_ipc_sealed *sealed);

// Closes a reader; its addresses are given back when the work on the named streams is done. Null is
// passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_pool_reader_close(struct gpu_ipc_pool_reader *reader);

// Describes the object that a reader has mapped.
//
// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
// `INVALID`.
//
// Caller: `info` has as many bytes as its `size` says.
int32_t gpu_ipc_reader_get_info(struct gpu_ipc_reader *reader, struct gpu_ipc_reader_info *info);

// Copies the bytes that the writer put beside the parts; as many as fit into `capacity`.
//
// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
// `INVALID`.
//
// Caller: There is room for `capacity` bytes.
int32_t gpu_ipc_reader_user(struct gpu_ipc_reader *reader, void *bytes, size_t capacity);

// Describes a part and its address, which stays the same for the reader's life, at every epoch.
//
// It is read-only: a kernel that writes there ends its context. Work on it is named with
// `gpu_ipc_reader_used_on`; work on a stream that was not named, and that is not finished when the
// reader advances, sleeps or is closed, is undefined behaviour.
//
// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
// `INVALID`.
//
// Caller: `name` ends with a zero byte; `part` has as many bytes as its `size` says.
int32_t gpu_ipc_reader_get_part(struct gpu_ipc_reader *reader, const char *name, struct gpu_ipc_part *part);

// Describes a part by its number: from 0 to below the count of parts, in the order of their names.
//
// Keeps: nothing. Thread: any. Blocks: while another call is in this reader. Errors: `BAD_HANDLE`,
// `INVALID`.
//
// Caller: `part` has as many bytes as its `size` says.
int32_t gpu_ipc_reader_get_part_at(struct gpu_ipc_reader *reader, size_t number, struct gpu_ipc_part *part);

// Copies `len` bytes of a part from `offset` on to the host.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the part's end, `ASLEEP`, `POISONED`, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there is room for `len` bytes.
int32_t gpu_ipc_reader_read(struct gpu_ipc_reader *reader, const char *name, uint64_t offset, void *bytes, size_t len);

// Copies a part into the part of the same name of an object that is being filled, on the device.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` for a part that either has not, of another length, or taken over; `MISMATCH` for a
// writer on another device; `ASLEEP`, `POISONED`, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte.
int32_t gpu_ipc_reader_copy_part(struct gpu_ipc_reader *reader, const char *name, struct gpu_ipc_writer *writer);

// Copies the whole object into memory of this process alone, which may be written to: scratch
// memory of the broker, which counts against its limits. The reader stays as it is.
//
// Keeps: nothing. Thread: any. Blocks: for the broker and until the copy has finished. Errors:
// `BAD_HANDLE`, `ASLEEP`, `POISONED`, `OUT_OF_MEMORY`, `REFUSED`, `DRIVER`, `DEADLINE`, `FORKED`.
int32_t gpu_ipc_reader_writable_copy(struct gpu_ipc_reader *reader, struct gpu_ipc_scratch **scratch);

// Names a stream whose work touches the object: advance, sleep and close wait for it.
//
// Keeps: the stream, until the reader is closed. Thread: any. Blocks: while another call is in
// this reader. Errors: `BAD_HANDLE`, `MISMATCH` for a stream of another device.
int32_t gpu_ipc_reader_used_on(struct gpu_ipc_reader *reader, struct gpu_ipc_stream *stream);

// Moves to an epoch of the name, with 0 to the newest, at the same addresses; `moved` says whether
// it was another one, and may be null.
//
// Waits for the streams that were named. The caller launches nothing meanwhile that touches the
// addresses; what was registered with them elsewhere (NCCL, RDMA) is registered anew.
//
// Keeps: nothing. Thread: any. Blocks: for the broker and the streams. Errors: `BAD_HANDLE`;
// `LAYOUT_DIFFERS`, `NOT_FOUND`, `ASLEEP`: nothing changed; `POISONED`: open the object anew;
// `DRIVER`, `DEADLINE`, `FORKED`.
int32_t gpu_ipc_reader_advance(struct gpu_ipc_reader *reader, uint64_t epoch, bool *moved);

// Moves to the object of an identity, as `gpu_ipc_reader_advance` does to an epoch.
//
// Keeps: nothing. Thread: any. Blocks: as `gpu_ipc_reader_advance`. Errors: as
// `gpu_ipc_reader_advance`.
int32_t gpu_ipc_reader_advance_identity(struct gpu_ipc_reader *reader,
                                        const struct gpu_ipc_identity *identity,
                                        bool *moved);

// Gives the mapping up, and keeps the addresses; with `release` the lease too, so that a sole
// reader's memory goes.
//
// Keeps: nothing. Thread: any. Blocks: for the streams that were named. Errors: `BAD_HANDLE`,
// `DRIVER`, `POISONED`, `FORKED`.
int32_t gpu_ipc_reader_sleep(struct gpu_ipc_reader *reader, bool release);

// Maps the same object again, at the same addresses.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: `BAD_HANDLE`, `NOT_FOUND` when the
// lease was released and the object has gone, `POISONED`, `DRIVER`, `DEADLINE`, `FORKED`; the
// reader sleeps on.
int32_t gpu_ipc_reader_wake(struct gpu_ipc_reader *reader);

// Maps an epoch of the name, with 0 the newest, at the same addresses. One that does not sleep
// advances.
//
// Keeps: nothing. Thread: any. Blocks: for the broker. Errors: as `gpu_ipc_reader_wake`, and
// `LAYOUT_DIFFERS`; the reader sleeps on.
int32_t gpu_ipc_reader_wake_to(struct gpu_ipc_reader *reader, uint64_t epoch);

// Closes a reader; its addresses are given back when the work on the named streams is done. Null
// is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_reader_close(struct gpu_ipc_reader *reader);

// Makes memory that is never committed: it counts against the broker's limits, and goes with this
// process. `name` is what the broker's listing calls it.
//
// Keeps: nothing; what describes the parts is copied. Thread: any. Blocks: for the broker, which
// may scrub memory first. Errors: `BAD_HANDLE`, `OUT_OF_MEMORY`, `REFUSED` for a limit, `INVALID`,
// `DEADLINE`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there are `count` parts with good pointers in them.
int32_t gpu_ipc_object_scratch(struct gpu_ipc_client *client,
                               const char *name,
                               const struct gpu_ipc_part_spec *parts,
                               size_t count,
                               struct gpu_ipc_scratch **scratch);

// Describes a part and its address. The GPU, and on the host backend the CPU, may write there
// until the close.
//
// Work on it is named with `gpu_ipc_scratch_used_on`: work on a stream that was not named, and
// that is not finished at the close, is undefined behaviour.
//
// Keeps: nothing. Thread: any. Blocks: while another call is in this memory. Errors: `BAD_HANDLE`,
// `INVALID`.
//
// Caller: `name` ends with a zero byte; `part` has as many bytes as its `size` says.
int32_t gpu_ipc_scratch_get_part(struct gpu_ipc_scratch *scratch, const char *name, struct gpu_ipc_part *part);

// Copies `len` bytes from the host into a part from `offset` on.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there are `len` bytes.
int32_t gpu_ipc_scratch_write(struct gpu_ipc_scratch *scratch,
                              const char *name,
                              uint64_t offset,
                              const void *bytes,
                              size_t len);

// Copies `len` bytes of a part from `offset` on to the host.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there is room for `len` bytes.
int32_t gpu_ipc_scratch_read(struct gpu_ipc_scratch *scratch,
                             const char *name,
                             uint64_t offset,
                             void *bytes,
                             size_t len);

// Names a stream whose work touches the memory: the close waits for it.
//
// Keeps: the stream, until that work is done. Thread: any. Blocks: while another call is in this
// memory. Errors: `BAD_HANDLE`, `MISMATCH` for a stream of another device.
int32_t gpu_ipc_scratch_used_on(struct gpu_ipc_scratch *scratch, struct gpu_ipc_stream *stream);

// Gives scratch memory up; it goes when the work on the named streams is done. Null is passed
// over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_scratch_close(struct gpu_ipc_scratch *scratch);

// Returns the bytes of a pool's journal for so many blocks: for 128 at least, and for 2,097,024 at
// most that a pool is made with.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: none.
uint64_t gpu_ipc_journal_bytes(uint32_t blocks);

// Describes a part and its address. The GPU, and on the host backend the CPU, may write there
// until the commit.
//
// Work on it is named with `gpu_ipc_writer_used_on` or at the commit: work on a stream that was
// not named is undefined behaviour.
//
// Keeps: nothing. Thread: any. Blocks: while another call is in this writer. Errors: `BAD_HANDLE`,
// `INVALID`.
//
// Caller: `name` ends with a zero byte; `part` has as many bytes as its `size` says.
int32_t gpu_ipc_writer_get_part(struct gpu_ipc_writer *writer, const char *name, struct gpu_ipc_part *part);

// Writes the identity of the object, by which `gpu_ipc_object_outcome` tells of its commit.
//
// Keeps: nothing. Thread: any. Blocks: while another call is in this writer. Errors: `BAD_HANDLE`,
// `INVALID`.
int32_t gpu_ipc_writer_identity(struct gpu_ipc_writer *writer, struct gpu_ipc_identity *identity);

// Copies `len` bytes from the host into a part from `offset` on.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the part's end, `DRIVER`, `FORKED`.
//
// Caller: `name` ends with a zero byte; there are `len` bytes.
int32_t gpu_ipc_writer_write(struct gpu_ipc_writer *writer,
                             const char *name,
                             uint64_t offset,
                             const void *bytes,
                             size_t len);

// Names a stream whose work touches the object: the commit waits for it.
//
// Keeps: the stream, until that work is done. Thread: any. Blocks: while another call is in this
// writer. Errors: `BAD_HANDLE`, `MISMATCH` for a stream of another device.
int32_t gpu_ipc_writer_used_on(struct gpu_ipc_writer *writer, struct gpu_ipc_stream *stream);

// Commits an object: it becomes visible, whole, once all that is queued on these streams, and on
// those that were named before, has finished. The handle is closed, whatever the call returns.
//
// With `epoch` it waits until the object is visible, and says its epoch. Without it returns at
// once: the commit goes on, and `gpu_ipc_object_outcome` tells what became of it.
//
// Keeps: the streams, until that work is done. Thread: any. Blocks: with `epoch` up to
// `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`; `CAPTURING` and `MISMATCH` for a stream:
// nothing is committed; `CONFLICT`, `WRITER_LOST`, `REFUSED`; `DEADLINE`: the commit goes on.
//
// Caller: There are `count` streams.
int32_t gpu_ipc_writer_commit(struct gpu_ipc_writer *writer,
                              struct gpu_ipc_stream *const *streams,
                              size_t count,
                              int64_t timeout_ns,
                              uint64_t *epoch);

// Closes a writer that was not committed: nobody ever sees the object. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_writer_close(struct gpu_ipc_writer *writer);

// Connects to a producer's session by the path of its socket, and starts the participant's thread.
//
// Keeps: nothing; texts are copied. Thread: any. Blocks: for the producer to listen and for its
// welcome, as the options say. Errors: `BAD_HANDLE`, `CONNECT`, `REFUSED` with the producer's reason, `DEADLINE`,
// `MISMATCH` for another version, `UNSUPPORTED`, `INVALID`, `SYSTEM`.
//
// Caller: `path` ends with a zero byte; `options` is null, or has as many bytes as its `size` says and
// good pointers in them.
int32_t gpu_ipc_connect(struct gpu_ipc_device *device,
                        const char *path,
                        const struct gpu_ipc_connect_options *options,
                        struct gpu_ipc_participant **participant);

// Joins a session by a connection that somebody else made: one end of a socket pair
// (`SOCK_SEQPACKET`) whose other end the session accepted, or what another process passed on.
//
// Every other copy of it must be closed, this one by the caller after the call: as long as one is
// open this process' death is not proven.
//
// Keeps: nothing; the library has a copy of its own. Thread: any. Blocks: as `gpu_ipc_connect`.
// Errors: as `gpu_ipc_connect`.
//
// Caller: `connection` is open, and nobody closes it during the call; `options` is as for
// `gpu_ipc_connect`.
int32_t gpu_ipc_connect_by(struct gpu_ipc_device *device,
                           int connection,
                           const struct gpu_ipc_connect_options *options,
                           struct gpu_ipc_participant **participant);

// Returns the number under which the producer shares with a participant; 0 after an error.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
uint64_t gpu_ipc_participant_id(struct gpu_ipc_participant *participant);

// Returns the descriptor that is readable while the participant has a notice; -1 after an error.
//
// It belongs to the participant and is good until that is closed: nobody else closes it.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int gpu_ipc_participant_fd(struct gpu_ipc_participant *participant);

// Claims what a descriptor grants.
//
// `wait` says what happens to the producer's work on the block: `GPU_IPC_WAIT` waits for it, on
// `stream` if there is one (which counts as used, so that the lease ends behind it), else on this
// thread; `GPU_IPC_NO_WAIT` does not.
//
// Keeps: the stream, until the work that the block was used for is done. Thread: any. Blocks: up
// to `timeout_ns`, below 0 for ever: for the producer's answer when the descriptor is a ticket or
// its region is not mapped yet, and for its work. Errors: `BAD_HANDLE`, `BAD_DESCRIPTOR`,
// `NOT_ADDRESSEE`, `REVOKED`, `ALREADY_CLAIMED`, `STALE`, `PRODUCER_GONE`, `CAPTURING`,
// `MISMATCH`, `FORKED`, `DRIVER`, and `DEADLINE`, after which the same claim can be made again.
//
// Caller: There are `len` bytes.
int32_t gpu_ipc_claim(struct gpu_ipc_participant *participant,
                      const void *descriptor,
                      size_t len,
                      uint32_t wait,
                      struct gpu_ipc_stream *stream,
                      int64_t timeout_ns,
                      struct gpu_ipc_received **received);

// Claims what a descriptor grants if that needs no waiting; otherwise asks for what it needs and
// answers `WOULD_BLOCK`. When it may have come, the participant has the notice
// `GPU_IPC_NOTICE_TRY_AGAIN`.
//
// Keeps: as `gpu_ipc_claim`; what was asked for, 30 seconds or until
// `gpu_ipc_participant_abandon`. Thread: any. Blocks: no. Errors: `WOULD_BLOCK`, and those of
// `gpu_ipc_claim` but `DEADLINE`.
//
// Caller: There are `len` bytes.
int32_t gpu_ipc_try_claim(struct gpu_ipc_participant *participant,
                          const void *descriptor,
                          size_t len,
                          uint32_t wait,
                          struct gpu_ipc_stream *stream,
                          struct gpu_ipc_received **received);

// Claims several descriptors, with one question for up to 56 tickets among them.
//
// Each gives a handle, or null, in `received`, and a code in `codes`, in the same order; one that
// fails does not touch the others. The call returns `GPU_IPC_OK` if all were claimed, else the
// code of the first that was not, of which the error's text tells.
//
// Keeps: as `gpu_ipc_claim`. Thread: any. Blocks: as `gpu_ipc_claim`, all of them together.
// Errors: as `gpu_ipc_claim`.
//
// Caller: There are `count` descriptors, and room for as many handles and codes; `codes` may be null.
int32_t gpu_ipc_claim_many(struct gpu_ipc_participant *participant,
                           const struct gpu_ipc_descriptor *descriptors,
                           size_t count,
                           uint32_t wait,
                           struct gpu_ipc_stream *stream,
                           int64_t timeout_ns,
                           struct gpu_ipc_received **received,
                           int32_t *codes);

// Asks ahead for what the claims of these descriptors will need, and does not wait for the
// answers: a claim within 30 seconds finds them there. What is no ticket is passed over.
//
// Keeps: what was asked for, 30 seconds. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
// `PRODUCER_GONE`, `FORKED`.
//
// Caller: There are `count` descriptors.
int32_t gpu_ipc_participant_prefetch(struct gpu_ipc_participant *participant,
                                     const struct gpu_ipc_descriptor *descriptors,
                                     size_t count);

// Gives up a claim that ran out of time or answered `WOULD_BLOCK`, or a prefetch. What a ticket gave
// goes back to the producer, and its claim is spent; a block that was claimed stays. What was granted
// to this participant by name can be claimed later.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: There are `len` bytes.
int32_t gpu_ipc_participant_abandon(struct gpu_ipc_participant *participant, const void *descriptor, size_t len);

// Closes a participant and waits until the producer has noted that: every block that it received
// is closed and its work done, everything is unmapped, and goodbye is said and heard. Null is
// passed over.
//
// The handle is closed whatever the call returns; after `DEADLINE` the rest goes on by itself.
//
// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
// `DEADLINE` with what is still held, `FORKED`.
int32_t gpu_ipc_participant_leave(struct gpu_ipc_participant *participant, int64_t timeout_ns);

// Closes a participant; blocks that it received stay good. It says goodbye when the last of them
// is closed and its work done. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_participant_close(struct gpu_ipc_participant *participant);

// Returns the address of a received block's first byte in this process; null after an error. On
// the host backend the CPU may use it.
//
// Every stream whose work touches the block is named with `gpu_ipc_received_used_on` before the
// block is closed (the one that the claim waited on is), and work of the CPU is over by then.
// Otherwise the producer may use the bytes again meanwhile: undefined behaviour that no library
// can see. The address means nothing in a forked child.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
void *gpu_ipc_received_ptr(struct gpu_ipc_received *received);

// Returns a received block's bytes; 0 after an error.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
uint64_t gpu_ipc_received_len(struct gpu_ipc_received *received);

// Returns the number of the region that a received block lies in, as `GPU_IPC_NOTICE_PLEASE_UNMAP`
// names it; 0 after an error, and for the first region: `gpu_ipc_last_error` tells them apart after
// `gpu_ipc_clear_error`.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
uint64_t gpu_ipc_received_region(struct gpu_ipc_received *received);

// Says whether a received block is only read: it was shared so, or the participant maps so. A write
// to its address faults, on a GPU in a way that breaks the context.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
int32_t gpu_ipc_received_is_read_only(struct gpu_ipc_received *received, bool *read_only);

// Returns the state of the contents at this moment: `GPU_IPC_STATE_...`. After a wait on a stream,
// call this after synchronising it.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
int32_t gpu_ipc_received_state(struct gpu_ipc_received *received, uint32_t *state);

// Waits for the producer's work on a block after its claim: on this thread, or by queueing the
// wait on a stream, which counts as used.
//
// Keeps: the stream, until its work is done. Thread: any. Blocks: without a stream up to
// `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`, `DEADLINE`, `CAPTURING`, `MISMATCH`,
// `FORKED`. The block stays held.
int32_t gpu_ipc_received_wait(struct gpu_ipc_received *received, struct gpu_ipc_stream *stream, int64_t timeout_ns);

// Names a stream of this process whose work touches the block, of any device and vendor: the lease
// ends behind it.
//
// Keeps: the stream, until that work is done. Thread: any. Blocks: no. Errors: `BAD_HANDLE`,
// `INVALID` for the per-thread default stream, `FORKED`.
int32_t gpu_ipc_received_used_on(struct gpu_ipc_received *received, struct gpu_ipc_stream *stream);

// Makes another handle for a part of a received block, under the same lease, which ends with the
// last of them.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` for a range that is
// empty or not in the block.
int32_t gpu_ipc_received_slice(struct gpu_ipc_received *received,
                               uint64_t offset,
                               uint64_t len,
                               struct gpu_ipc_received **part);

// Copies `len` bytes into a received block from `offset` on, after the work that is queued on the
// stream.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID` beyond the block's end and for a participant that maps read-only, `MISMATCH`,
// `CAPTURING`, `DRIVER`.
//
// Caller: There are `len` bytes.
int32_t gpu_ipc_received_write(struct gpu_ipc_received *received,
                               uint64_t offset,
                               const void *bytes,
                               size_t len,
                               struct gpu_ipc_stream *stream);

// Copies `len` bytes of a received block from `offset` on to the host, after the work that is
// queued on the stream.
//
// Keeps: nothing. Thread: any. Blocks: until the copy has finished. Errors: `BAD_HANDLE`,
// `INVALID`, `MISMATCH`, `CAPTURING`, `DRIVER`; then the bytes are as they were.
//
// Caller: There is room for `len` bytes.
int32_t gpu_ipc_received_read(struct gpu_ipc_received *received,
                              uint64_t offset,
                              void *bytes,
                              size_t len,
                              struct gpu_ipc_stream *stream);

// Asks the producer for a descriptor of a received block for another participant: the one of that
// number in the same session, or with 0 the first `claims` that ask (`GPU_IPC_EVERYBODY`: all).
// The new lease does not depend on this one.
//
// Waits for the producer's work on the block first. Work of this process on it must be done: the
// receiver waits for none.
//
// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
// `INVALID` for no participant, `REFUSED` and `PARTICIPANT_GONE`, `PRODUCER_GONE`, `STALE` for
// contents that are garbage, `DEADLINE`, `FORKED`.
int32_t gpu_ipc_received_forward(struct gpu_ipc_received *received,
                                 uint64_t participant,
                                 uint32_t claims,
                                 int64_t timeout_ns,
                                 struct gpu_ipc_descriptor *descriptor);

// Asks the producer for a descriptor as `gpu_ipc_received_forward` does, with up to 64 bytes of the
// user's own: those that the received descriptor has, which `gpu_ipc_descriptor_get_info` reads, or
// others. Bytes that are left out are zero.
//
// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: as
// `gpu_ipc_received_forward`, and `INVALID` for more than 64 bytes.
//
// Caller: There are `user_len` bytes.
int32_t gpu_ipc_received_forward_with(struct gpu_ipc_received *received,
                                      uint64_t participant,
                                      uint32_t claims,
                                      const uint8_t *user,
                                      size_t user_len,
                                      int64_t timeout_ns,
                                      struct gpu_ipc_descriptor *descriptor);

// Closes a received block. The lease ends when its last handle is closed and all work on the
// streams that were named is done. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_received_close(struct gpu_ipc_received *received);

// Closes many received blocks at the cost of a few: those that follow each other and were used on
// the same streams wait for one event on each, and one batch of stores ends them. Nulls are passed
// over.
//
// Every handle that is good is closed, whatever the call returns.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE` if any of them was bad.
//
// Caller: There are `count` handles.
int32_t gpu_ipc_received_close_many(struct gpu_ipc_received *const *received, size_t count);

// Opens a session: binds its socket and starts its thread.
//
// Keeps: nothing; texts are copied. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` when
// somebody listens on the path already, `UNSUPPORTED` on a device that shares no memory, `SYSTEM`.
//
// Caller: `options` is null, or has as many bytes as its `size` says and good pointers in them.
int32_t gpu_ipc_session_open(struct gpu_ipc_device *device,
                             const struct gpu_ipc_session_options *options,
                             struct gpu_ipc_session **session);

// Writes the path of a session's socket, with a zero byte behind.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID` for a buffer that is
// too small: 4,096 bytes are always enough.
//
// Caller: `buffer` has `capacity` bytes.
int32_t gpu_ipc_session_path(struct gpu_ipc_session *session, char *buffer, size_t capacity);

// Allocates a block of `len` bytes, aligned to 256.
//
// Before the device is asked for more, what leases have ended is collected; when it has no more,
// participants are asked to unmap what they do not use.
//
// Keeps: nothing. Thread: any. Blocks: in the driver, and up to 100 ms for participants when
// memory is short; with `timeout_ns` above 0 up to that long for room. Errors: `BAD_HANDLE`,
// `OUT_OF_MEMORY` with who holds it, `INVALID` for 0 bytes, `CLOSING`, `FORKED`.
int32_t gpu_ipc_alloc(struct gpu_ipc_session *session, uint64_t len, int64_t timeout_ns, struct gpu_ipc_block **block);

// Takes in memory of another allocator, so that it can be shared: `len` bytes at `memory` that lie
// in one allocation.
//
// The memory stays allocated, and no other block overlaps it, until `returned` was called, or the
// process ends. That is when the block was dropped, its last lease has ended, and nobody maps it.
//
// Keeps: the memory, `returned` and `context`, until `returned` is called: once, inside a
// `gpu_ipc_session_collect` or `gpu_ipc_session_shutdown` of this session, on the thread of that
// call and with no lock held, so that it may call any function. A notice
// `GPU_IPC_NOTICE_TOKENS_RETURNED` says that a collect would. Thread: any. Blocks: no. Errors:
// `BAD_HANDLE`, `UNSUPPORTED` for memory that cannot be shared, with what to change; `INVALID`,
// `CLOSING`, `FORKED`. After an error `returned` is not called.
//
// Caller: The memory stays allocated, and overlaps no other block, as said above; `returned` may be called
// with `context` on the threads named.
int32_t gpu_ipc_adopt(struct gpu_ipc_session *session,
                      void *memory,
                      uint64_t len,
                      gpu_ipc_callback returned,
                      void *context,
                      struct gpu_ipc_block **block);

// Looks for leases that have ended, gives back what nothing holds any more, and calls `returned`
// of adopted memory that is its owner's again. The session's own thread collects too, but calls
// nothing back.
//
// Keeps: nothing. `collected` may be null. Thread: any. Blocks: no, but for the callbacks. Errors:
// `BAD_HANDLE`, `INVALID`.
//
// Caller: `collected` is null, or has as many bytes as its `size` says.
int32_t gpu_ipc_session_collect(struct gpu_ipc_session *session, struct gpu_ipc_collected *collected);

// Fills in a session's counts; in a forked child they are 0.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`.
//
// Caller: `stats` has as many bytes as its `size` says.
int32_t gpu_ipc_session_get_stats(struct gpu_ipc_session *session, struct gpu_ipc_stats *stats);

// Returns regions that nobody uses or maps to the driver, and says how many bytes.
//
// Keeps: nothing. `bytes` may be null. Thread: any. Blocks: in the driver. Errors: `BAD_HANDLE`,
// `DRIVER`, `FORKED`.
int32_t gpu_ipc_session_trim(struct gpu_ipc_session *session, uint64_t *bytes);

// Lists the participants that are connected: as many numbers as fit into `capacity`, and how many
// there are. With a `least` above 0 it waits until that many are connected.
//
// Keeps: nothing. Thread: any. Blocks: with `least` above 0 up to `timeout_ns`, below 0 for ever.
// Errors: `BAD_HANDLE`, `DEADLINE`, `INVALID`, `FORKED`.
//
// Caller: `participants` has room for `capacity` numbers, or is null and `capacity` 0.
int32_t gpu_ipc_session_participants(struct gpu_ipc_session *session,
                                     size_t least,
                                     int64_t timeout_ns,
                                     uint64_t *participants,
                                     size_t capacity,
                                     size_t *count);

// Writes what a participant calls itself, or else the command that it runs, with a zero byte
// behind: of one that is connected, or that one of the last 64 notices of the session said has
// left.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `PARTICIPANT_GONE`, `INVALID` for
// a buffer that is too small: 256 bytes are always enough.
//
// Caller: `buffer` has `capacity` bytes.
int32_t gpu_ipc_session_participant_name(struct gpu_ipc_session *session,
                                         uint64_t participant,
                                         char *buffer,
                                         size_t capacity);

// Takes in a connection that reached the application in another way than through the session's
// socket: one end of a socket pair (`SOCK_SEQPACKET`), or what another process passed on.
//
// Every other copy of it must be closed, this one by the caller after the call: as long as one is
// open the participant's death is not proven.
//
// Keeps: nothing; the library has a copy of its own. Thread: any. Blocks: no. Errors:
// `BAD_HANDLE`, `INVALID` for what is no such socket, `CLOSING`, `FORKED`, `SYSTEM`.
//
// Caller: `connection` is open, and nobody closes it during the call.
int32_t gpu_ipc_session_accept(struct gpu_ipc_session *session, int connection);

// Returns the descriptor that is readable while the session has a notice; -1 after an error.
//
// It belongs to the session and is good until that is closed: nobody else closes it.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int gpu_ipc_session_fd(struct gpu_ipc_session *session);

// Shares nothing more, closes the socket, and waits until nothing is held or the time is over.
// Calls `returned` of adopted memory that came home. Whatever is held after that stays safe; ask
// `gpu_ipc_session_get_stats` what it is.
//
// Can be called again to wait longer. The handle stays open.
//
// Keeps: nothing. Thread: any. Blocks: up to `timeout_ns`, below 0 for ever. Errors: `BAD_HANDLE`,
// `DEADLINE` while something is held, with what and by whom; `FORKED`.
int32_t gpu_ipc_session_shutdown(struct gpu_ipc_session *session, int64_t timeout_ns);

// Closes a session: its socket goes with the last use of it. Blocks that were allocated stay good,
// with this process and with others. Adopted memory whose `returned` was not called stays lent
// until the process ends: shut the session down first. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_session_close(struct gpu_ipc_session *session);

// Makes a stream that waits for no other.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`, `DRIVER`.
int32_t gpu_ipc_stream_create(struct gpu_ipc_device *device, struct gpu_ipc_stream **stream);

// Takes an application's stream by the driver's handle: a `cudaStream_t`, `CUstream` or
// `hipStream_t`.
//
// Null and 1 are the legacy default stream of `device`. 2 is the calling thread's default stream
// of `device`, which is taken by calls that queue at once and refused by those where a later
// moment counts (`..._used_on`).
//
// The stream must live until `released` was called, which may be after `gpu_ipc_stream_close`: a
// lease that ends behind the stream's work still needs it. Without `released` it must live until
// the process ends. No thread may begin to capture it while another is in a call that was given
// it.
//
// Keeps: the stream, `released` and `context`, until `released` is called: once, on a thread of
// the library's own that holds no lock, so that it may call any function. Not in a forked child.
// Thread: any. Blocks: no. Errors: `BAD_HANDLE`, `INVALID`, `MISMATCH` for a stream of another
// device or context, `SYSTEM`. After an error `released` is not called.
//
// Caller: `handle` is a live stream, and stays so as said above; `released` may be called with `context`
// on any thread.
int32_t gpu_ipc_stream_borrow(struct gpu_ipc_device *device,
                              void *handle,
                              gpu_ipc_callback released,
                              void *context,
                              struct gpu_ipc_stream **stream);

// Blocks until all that is queued on a stream has finished.
//
// Keeps: nothing. Thread: any. Blocks: as long as the work takes. Errors: `BAD_HANDLE`, `DRIVER`,
// an error of earlier work among them.
int32_t gpu_ipc_stream_synchronize(struct gpu_ipc_stream *stream);

// Closes a stream. What was used on it keeps it until that work is done; then one that was made
// here is destroyed, and of a borrowed one it is told. Null is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `BAD_HANDLE`.
int32_t gpu_ipc_stream_close(struct gpu_ipc_stream *stream);

// Lets PyTorch allocate its segments of this session's device from the session, by
// `gpu_ipc_torch_alloc` and `gpu_ipc_torch_free`. To be called once for each device, before
// PyTorch allocates there.
//
// Keeps: the session, until the process ends: segments may outlive the handle. Thread: any.
// Blocks: no. Errors: `BAD_HANDLE`, `UNSUPPORTED` for a session that is on no CUDA device,
// `INVALID` when another session has that device.
int32_t gpu_ipc_torch_use(struct gpu_ipc_session *session);

// Allocates a segment for PyTorch; null when there is none, which PyTorch takes for no memory. For
// `CUDAPluggableAllocator(path, "gpu_ipc_torch_alloc", "gpu_ipc_torch_free")`.
//
// Keeps: nothing. Thread: any. Blocks: as `gpu_ipc_alloc`. Errors: as `gpu_ipc_alloc`; `INVALID`
// for a device that no session was named for by `gpu_ipc_torch_use`.
void *gpu_ipc_torch_alloc(ptrdiff_t size, int device, void *stream);

// Takes a segment of PyTorch's back. It stays with those who hold leases on parts of it, and until
// the work on its stream is done. What was not allocated here is passed over.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: `DRIVER`, `MISMATCH`: then the segment is kept
// until the process ends, for nobody knows when its work is done.
void gpu_ipc_torch_free(void *start, ptrdiff_t size, int device, void *stream);

// Returns the version of the library that runs, in the form of `GPU_IPC_VERSION`, which is that of
// the header.
//
// Keeps: nothing. Thread: any. Blocks: no. Errors: none.
uint32_t gpu_ipc_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// The structures are those that the library was compiled with.
#ifdef __cplusplus
#define GPU_IPC_SIZE(type, bytes) static_assert(sizeof(type) == (bytes), #type)
#define GPU_IPC_FIELD(type, field, at, bytes) \
    static_assert(offsetof(type, field) == (at) && sizeof(type::field) == (bytes), #type "." #field)
#else
#define GPU_IPC_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)
#define GPU_IPC_FIELD(type, field, at, bytes) \
    _Static_assert(offsetof(type, field) == (at) && sizeof(((type *)0)->field) == (bytes), #type "." #field)
#endif
GPU_IPC_SIZE(gpu_ipc_client_options, 32);
GPU_IPC_FIELD(gpu_ipc_client_options, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_client_options, dir, 8, 8);
GPU_IPC_FIELD(gpu_ipc_client_options, name, 16, 8);
GPU_IPC_FIELD(gpu_ipc_client_options, patience_ns, 24, 8);
GPU_IPC_SIZE(gpu_ipc_collected, 32);
GPU_IPC_FIELD(gpu_ipc_collected, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_collected, blocks, 8, 8);
GPU_IPC_FIELD(gpu_ipc_collected, bytes, 16, 8);
GPU_IPC_FIELD(gpu_ipc_collected, returned, 24, 8);
GPU_IPC_SIZE(gpu_ipc_connect_options, 56);
GPU_IPC_FIELD(gpu_ipc_connect_options, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_connect_options, name, 8, 8);
GPU_IPC_FIELD(gpu_ipc_connect_options, timeout_ns, 16, 8);
GPU_IPC_FIELD(gpu_ipc_connect_options, cache_bytes, 24, 8);
GPU_IPC_FIELD(gpu_ipc_connect_options, cache_regions, 32, 8);
GPU_IPC_FIELD(gpu_ipc_connect_options, read_only, 40, 4);
GPU_IPC_FIELD(gpu_ipc_connect_options, reserved, 44, 4);
GPU_IPC_FIELD(gpu_ipc_connect_options, wait_for_producer_ns, 48, 8);
GPU_IPC_SIZE(gpu_ipc_create_options, 88);
GPU_IPC_FIELD(gpu_ipc_create_options, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, user, 8, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, user_len, 16, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, uids, 24, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, uid_count, 32, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, readers, 40, 4);
GPU_IPC_FIELD(gpu_ipc_create_options, expect, 44, 4);
GPU_IPC_FIELD(gpu_ipc_create_options, expected, 48, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, replace, 56, 4);
GPU_IPC_FIELD(gpu_ipc_create_options, reserved, 60, 4);
GPU_IPC_FIELD(gpu_ipc_create_options, groups, 64, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, unchanged, 72, 8);
GPU_IPC_FIELD(gpu_ipc_create_options, unchanged_count, 80, 8);
GPU_IPC_SIZE(gpu_ipc_descriptor, 192);
GPU_IPC_FIELD(gpu_ipc_descriptor, bytes, 0, 192);
GPU_IPC_SIZE(gpu_ipc_descriptor_info, 104);
GPU_IPC_FIELD(gpu_ipc_descriptor_info, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_descriptor_info, len, 8, 8);
GPU_IPC_FIELD(gpu_ipc_descriptor_info, participant, 16, 8);
GPU_IPC_FIELD(gpu_ipc_descriptor_info, session, 24, 16);
GPU_IPC_FIELD(gpu_ipc_descriptor_info, user, 40, 64);
GPU_IPC_SIZE(gpu_ipc_device_info, 168);
GPU_IPC_FIELD(gpu_ipc_device_info, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_device_info, backend, 8, 4);
GPU_IPC_FIELD(gpu_ipc_device_info, number, 12, 4);
GPU_IPC_FIELD(gpu_ipc_device_info, uuid, 16, 16);
GPU_IPC_FIELD(gpu_ipc_device_info, total_bytes, 32, 8);
GPU_IPC_FIELD(gpu_ipc_device_info, name, 40, 128);
GPU_IPC_SIZE(gpu_ipc_grant, 24);
GPU_IPC_FIELD(gpu_ipc_grant, block, 0, 8);
GPU_IPC_FIELD(gpu_ipc_grant, participant, 8, 8);
GPU_IPC_FIELD(gpu_ipc_grant, claims, 16, 4);
GPU_IPC_FIELD(gpu_ipc_grant, reserved, 20, 4);
GPU_IPC_SIZE(gpu_ipc_identity, 16);
GPU_IPC_FIELD(gpu_ipc_identity, bytes, 0, 16);
GPU_IPC_SIZE(gpu_ipc_key, 16);
GPU_IPC_FIELD(gpu_ipc_key, bytes, 0, 16);
GPU_IPC_SIZE(gpu_ipc_notice, 16);
GPU_IPC_FIELD(gpu_ipc_notice, kind, 0, 4);
GPU_IPC_FIELD(gpu_ipc_notice, how, 4, 4);
GPU_IPC_FIELD(gpu_ipc_notice, number, 8, 8);
GPU_IPC_SIZE(gpu_ipc_part, 800);
GPU_IPC_FIELD(gpu_ipc_part, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_part, ptr, 8, 8);
GPU_IPC_FIELD(gpu_ipc_part, len, 16, 8);
GPU_IPC_FIELD(gpu_ipc_part, rank, 24, 4);
GPU_IPC_FIELD(gpu_ipc_part, type_code, 28, 1);
GPU_IPC_FIELD(gpu_ipc_part, type_bits, 29, 1);
GPU_IPC_FIELD(gpu_ipc_part, type_lanes, 30, 2);
GPU_IPC_FIELD(gpu_ipc_part, shape, 32, 256);
GPU_IPC_FIELD(gpu_ipc_part, strides, 288, 256);
GPU_IPC_FIELD(gpu_ipc_part, name, 544, 256);
GPU_IPC_SIZE(gpu_ipc_part_spec, 32);
GPU_IPC_FIELD(gpu_ipc_part_spec, name, 0, 8);
GPU_IPC_FIELD(gpu_ipc_part_spec, shape, 8, 8);
GPU_IPC_FIELD(gpu_ipc_part_spec, strides, 16, 8);
GPU_IPC_FIELD(gpu_ipc_part_spec, rank, 24, 4);
GPU_IPC_FIELD(gpu_ipc_part_spec, type_code, 28, 1);
GPU_IPC_FIELD(gpu_ipc_part_spec, type_bits, 29, 1);
GPU_IPC_FIELD(gpu_ipc_part_spec, type_lanes, 30, 2);
GPU_IPC_SIZE(gpu_ipc_pool_info, 312);
GPU_IPC_FIELD(gpu_ipc_pool_info, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_pool_info, generation, 8, 8);
GPU_IPC_FIELD(gpu_ipc_pool_info, identity, 16, 16);
GPU_IPC_FIELD(gpu_ipc_pool_info, part_count, 32, 8);
GPU_IPC_FIELD(gpu_ipc_pool_info, user_len, 40, 8);
GPU_IPC_FIELD(gpu_ipc_pool_info, blocks, 48, 4);
GPU_IPC_FIELD(gpu_ipc_pool_info, previous, 52, 4);
GPU_IPC_FIELD(gpu_ipc_pool_info, name, 56, 256);
GPU_IPC_SIZE(gpu_ipc_reader_info, 312);
GPU_IPC_FIELD(gpu_ipc_reader_info, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_reader_info, epoch, 8, 8);
GPU_IPC_FIELD(gpu_ipc_reader_info, identity, 16, 16);
GPU_IPC_FIELD(gpu_ipc_reader_info, part_count, 32, 8);
GPU_IPC_FIELD(gpu_ipc_reader_info, user_len, 40, 8);
GPU_IPC_FIELD(gpu_ipc_reader_info, asleep, 48, 4);
GPU_IPC_FIELD(gpu_ipc_reader_info, reserved, 52, 4);
GPU_IPC_FIELD(gpu_ipc_reader_info, name, 56, 256);
GPU_IPC_SIZE(gpu_ipc_region, 16);
GPU_IPC_FIELD(gpu_ipc_region, ptr, 0, 8);
GPU_IPC_FIELD(gpu_ipc_region, len, 8, 8);
GPU_IPC_SIZE(gpu_ipc_seal, 20);
GPU_IPC_FIELD(gpu_ipc_seal, key, 0, 16);
GPU_IPC_FIELD(gpu_ipc_seal, block, 16, 4);
GPU_IPC_SIZE(gpu_ipc_sealed, 24);
GPU_IPC_FIELD(gpu_ipc_sealed, key, 0, 16);
GPU_IPC_FIELD(gpu_ipc_sealed, block, 16, 4);
GPU_IPC_FIELD(gpu_ipc_sealed, generation, 20, 4);
GPU_IPC_SIZE(gpu_ipc_session_options, 72);
GPU_IPC_FIELD(gpu_ipc_session_options, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, socket, 8, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, uids, 16, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, uid_count, 24, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, region_bytes, 32, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, time_to_live_ns, 40, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, quarantine_ns, 48, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, max_leases, 56, 8);
GPU_IPC_FIELD(gpu_ipc_session_options, grows_in_place, 64, 8);
GPU_IPC_SIZE(gpu_ipc_share_options, 88);
GPU_IPC_FIELD(gpu_ipc_share_options, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_share_options, time_to_live_ns, 8, 8);
GPU_IPC_FIELD(gpu_ipc_share_options, user, 16, 64);
GPU_IPC_FIELD(gpu_ipc_share_options, read_only, 80, 4);
GPU_IPC_FIELD(gpu_ipc_share_options, reserved, 84, 4);
GPU_IPC_SIZE(gpu_ipc_stats, 184);
GPU_IPC_FIELD(gpu_ipc_stats, size, 0, 8);
GPU_IPC_FIELD(gpu_ipc_stats, live_blocks, 8, 8);
GPU_IPC_FIELD(gpu_ipc_stats, live_bytes, 16, 8);
GPU_IPC_FIELD(gpu_ipc_stats, limbo_blocks, 24, 8);
GPU_IPC_FIELD(gpu_ipc_stats, limbo_bytes, 32, 8);
GPU_IPC_FIELD(gpu_ipc_stats, in_flight, 40, 8);
GPU_IPC_FIELD(gpu_ipc_stats, held, 48, 8);
GPU_IPC_FIELD(gpu_ipc_stats, quarantined, 56, 8);
GPU_IPC_FIELD(gpu_ipc_stats, quarantined_bytes, 64, 8);
GPU_IPC_FIELD(gpu_ipc_stats, poisoned, 72, 8);
GPU_IPC_FIELD(gpu_ipc_stats, leaked_blocks, 80, 8);
GPU_IPC_FIELD(gpu_ipc_stats, leaked_bytes, 88, 8);
GPU_IPC_FIELD(gpu_ipc_stats, revoked, 96, 8);
GPU_IPC_FIELD(gpu_ipc_stats, expired, 104, 8);
GPU_IPC_FIELD(gpu_ipc_stats, deaths, 112, 8);
GPU_IPC_FIELD(gpu_ipc_stats, corrupt_words, 120, 8);
GPU_IPC_FIELD(gpu_ipc_stats, tickets, 128, 8);
GPU_IPC_FIELD(gpu_ipc_stats, participants, 136, 8);
GPU_IPC_FIELD(gpu_ipc_stats, regions, 144, 8);
GPU_IPC_FIELD(gpu_ipc_stats, reserved_bytes, 152, 8);
GPU_IPC_FIELD(gpu_ipc_stats, in_use_bytes, 160, 8);
GPU_IPC_FIELD(gpu_ipc_stats, pinned_bytes, 168, 8);
GPU_IPC_FIELD(gpu_ipc_stats, unmarked_blocks, 176, 8);
#undef GPU_IPC_SIZE
#undef GPU_IPC_FIELD

#endif  /* GPU_IPC_H */

#endif  /* C11 or C++11 */

"""Share GPU memory between processes without copying it, and free it when the last process is done, even after a crash.

A producer opens a `Session`, shares arrays and sends the descriptors, which are plain bytes, by any transport::

    with gpu_ipc.Session("cuda:0") as session:
        print(session.path)
        reader = session.wait_for_participants(1)[0]
        descriptor = session.share(tensor, to=reader)

A consumer connects, claims, and makes arrays of its own library of what it received::

    with gpu_ipc.connect(path) as participant:
        x = torch.from_dlpack(participant.claim(descriptor))

The array keeps its lease. The producer's memory is free again when the last array of the last consumer is dropped and
the GPU work on it is done, or when the consumer's death is proven. Without a GPU the same program runs on the host backend,
``"host:0"``, with numpy.

==========================  ==========================================================================================
`Session`, `Block`          a producer: allocate, share, wait, collect
`Descriptor`                what travels; ``bytes(descriptor)``, and it pickles
`Descriptors`               those of several arrays, in one piece of bytes
`Ticket`, `ParticipantId`   whom a grant is for
`connect`, `Participant`    a consumer: claim, one or many, or in asyncio
`Received`                  an array under a lease
`connect_broker`, `Broker`  objects that outlive their writer: `put`, `create`, `open`, `watch`
`Object`, `ObjectWriter`    one that is mapped, and one that is being filled; `Part`, an array in it
`Scratch`                   memory of this process alone, such as a copy of an object that may be written to
`Pool`, `PoolReader`        memory that stays writable and outlives its holder: `create_pool`, `adopt`, `read_pool`; `Sealed`, `journal_bytes`
`Stream`                    a stream, for programs without an array library
`detect`                    which devices there are, and why not the others
`sessions`, `inspect`       who holds what, from outside
`Error`                     what can go wrong, by what a caller can do about it
==========================  ==========================================================================================

What the library has to say goes to the logger ``gpu_ipc`` of `logging`.
"""

from gpu_ipc import _objects, _threads
from gpu_ipc._errors import (
    Aborted,
    AlreadyClaimed,
    Asleep,
    BadDescriptor,
    Capturing,
    Closed,
    Conflict,
    ConnectFailed,
    DriverFailed,
    Error,
    Exhausted,
    Forked,
    Invalid,
    LayoutDiffers,
    Mismatch,
    NoDevice,
    NotCompiled,
    NotFound,
    OutOfMemory,
    ParticipantGone,
    Poisoned,
    ProducerGone,
    Refused,
    Revoked,
    Stale,
    SystemFailed,
    Timeout,
    Unavailable,
    Unsupported,
    WouldBlock,
    WriterLost,
    WrongParticipant,
)
from gpu_ipc._gpu_ipc import (
    Block,
    Broker,
    Collected,
    Descriptor,
    Descriptors,
    Detected,
    Device,
    Holder,
    Loan,
    Notice,
    Object,
    ObjectWriter,
    Part,
    Participant,
    ParticipantId,
    Pool,
    PoolReader,
    Received,
    Scratch,
    Sealed,
    Session,
    SessionNotice,
    SessionReport,
    ShutdownReport,
    SourceUsage,
    Stats,
    Stream,
    Ticket,
    connect,
    connect_broker,
    detect,
    inspect,
    journal_bytes,
    sessions,
    __version__,
)

__all__ = [
    "Aborted",
    "AlreadyClaimed",
    "Asleep",
    "BadDescriptor",
    "Block",
    "Broker",
    "Capturing",
    "Closed",
    "Collected",
    "Conflict",
    "ConnectFailed",
    "Descriptor",
    "Descriptors",
    "Detected",
    "Device",
    "DriverFailed",
    "Error",
    "Exhausted",
    "Forked",
    "Holder",
    "Invalid",
    "LayoutDiffers",
    "Loan",
    "Mismatch",
    "NoDevice",
    "NotCompiled",
    "NotFound",
    "Notice",
    "Object",
    "ObjectWriter",
    "OutOfMemory",
    "Part",
    "Participant",
    "ParticipantGone",
    "ParticipantId",
    "Poisoned",
    "Pool",
    "PoolReader",
    "ProducerGone",
    "Received",
    "Refused",
    "Revoked",
    "Scratch",
    "Sealed",
    "Session",
    "SessionNotice",
    "SessionReport",
    "ShutdownReport",
    "SourceUsage",
    "Stale",
    "Stats",
    "Stream",
    "SystemFailed",
    "Ticket",
    "Timeout",
    "Unavailable",
    "Unsupported",
    "WouldBlock",
    "WriterLost",
    "WrongParticipant",
    "connect",
    "connect_broker",
    "detect",
    "inspect",
    "journal_bytes",
    "sessions",
]

_threads.prepare()
_objects.register()

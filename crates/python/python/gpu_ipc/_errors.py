"""What can go wrong, by what a caller can do about it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_ipc._gpu_ipc import ParticipantId


class Error(Exception):
    """Anything that goes wrong in the library. The text says what to do.

    ``code`` is the library's number of it, the same in every version and language.
    """

    code: int = 0


class OutOfMemory(Error, MemoryError):
    """The device has no room. Collect, drop blocks, or trim, then try again."""

    code = 1


class Exhausted(Error):
    """A limit of the library or of the system is reached. Raise it or hold less."""

    code = 2


class Unavailable(Error):
    """This machine cannot run that backend, or has no such device."""

    code = 4


class NotCompiled(Unavailable):
    """The backend is not in this build."""

    code = 3


class NoDevice(Unavailable):
    """This process cannot see the device."""

    code = 5


class Unsupported(Error):
    """The device, the driver or the memory cannot do that. The text says what to change."""

    code = 6


class Invalid(Error, ValueError):
    """An argument is wrong. Mend the call."""

    code = 7


class BadDescriptor(Error, ValueError):
    """The bytes are no descriptor of this version. Send it again, whole and unchanged."""

    code = 8


class Mismatch(Error, ValueError):
    """Both sides are well, but they do not belong together."""

    code = 9


class ConnectFailed(Error, ConnectionError):
    """Nobody, or somebody who is not allowed, is at the other end."""

    code = 10


class Refused(Error):
    """The producer refused what was asked of it, and says why."""

    code = 11


class ProducerGone(Error, ConnectionError):
    """The producer is dead or has closed its session. What is held stays readable; connect to its successor."""

    code = 12


class ParticipantGone(Error):
    """The participant is unknown, dead or gone. Share with one that is connected.

    ``participant`` is its ``ParticipantId``: of a call for several, that of the first.
    """

    code = 13
    participant: "ParticipantId | None" = None


class Forked(Error):
    """The object belongs to the process that this one was forked from. Open an own one here, or use ``spawn``."""

    code = 14


class Capturing(Error):
    """The stream is being captured into a graph, and a graph may run more than once."""

    code = 15


class Closed(Error):
    """The session is closed. Open a new one."""

    code = 16


class Timeout(Error, TimeoutError):
    """The time is over. Ask again; nothing was lost."""

    code = 17


class DriverFailed(Error):
    """A call of the driver failed."""

    code = 18


class SystemFailed(Error, OSError):
    """A call of the operating system failed."""

    code = 19


class WouldBlock(Error, BlockingIOError):
    """The call would have to wait, and was asked not to."""

    code = 101


class Revoked(Error):
    """The producer took the grant back, or nobody claimed it in time. Ask it to share again."""

    code = 102


class AlreadyClaimed(Error):
    """The descriptor was claimed before. Use what the first claim gave."""

    code = 103


class Stale(Error):
    """The lease ended long ago, or the producer died before its work was done. Ask for it again."""

    code = 104


class WrongParticipant(Refused):
    """The descriptor is not for this participant."""

    code = 105


class NotFound(Error, LookupError):
    """There is no such object that this user may open. ``broker.listing()`` shows what there is."""

    code = 201


class Conflict(Error):
    """The name has another epoch than the one that was expected. Open that one and decide again."""

    code = 202


class WriterLost(Error, ConnectionError):
    """The broker died while the object was being filled. Create it anew."""

    code = 203


class Aborted(Error):
    """The object was aborted before it was committed. Create it anew."""

    code = 204


class LayoutDiffers(Error):
    """Two epochs have different parts. Nothing changed; open the other one as an object of its own."""

    code = 205


class Poisoned(Error):
    """Neither the new memory nor the old could be mapped: the addresses reach nothing. Open the object anew."""

    code = 206


class Asleep(Error):
    """The object sleeps: its addresses reach nothing. Wake it first."""

    code = 207


def _name(known: dict[str, object]) -> None:
    for one in known.values():
        if isinstance(one, type) and issubclass(one, Error):
            one.__module__ = "gpu_ipc"


# They are part of `gpu_ipc`, and tracebacks and pickles say so.
_name(dict(globals()))

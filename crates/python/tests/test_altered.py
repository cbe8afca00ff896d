"""Descriptors that a carrier altered: refused, with nothing mapped or spent, whatever checksums it mended."""

import hashlib
from collections.abc import Callable, Iterator

import numpy
import pytest
from conftest import WATCHDOG

import gpu_ipc

# Of the library's own part: its flags, its user bytes, the digest in them, and what is behind.
GRANT, FLAGS, USER, DIGEST, BEHIND = 192, 104, 112, 144, 176


def mended(data: bytes) -> bytes:
    """Give altered bytes the digest of their layout, which needs no key."""
    if len(data) < GRANT:
        return data
    return data[:DIGEST] + hashlib.sha256(data[GRANT:]).digest() + data[BEHIND:]


def altered(good: bytes) -> Iterator[bytes]:
    """Change each byte of what is behind the library's own; cut it, and append to it."""
    for at in range(GRANT, len(good)):
        for change in (0x01, 0x80, 0xFF):
            yield good[:at] + bytes([good[at] ^ change]) + good[at + 1 :]
    for length in range(GRANT, len(good)):
        yield good[:length]
    yield good + b"\0"


def sharing(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> dict[str, Callable[[], gpu_ipc.Descriptor]]:
    array = numpy.from_dlpack(session.alloc(48)).view(numpy.int16)
    array[:] = numpy.arange(24)
    # With strides, and bytes of the user's own.
    view = array.reshape(4, 6)[:, ::2]
    loan = session.lend(view)
    return {
        "addressed": lambda: session.share(view, to=participant, meta=b"frame 7"),
        "ticket": lambda: session.share(view, to=session.ticket(1), meta=b"frame 7"),
        "many": lambda: session.share_many([array, view], to=participant)[1],
        "loan": lambda: loan.share(session.ticket(None), meta=b"frame 7"),
        "forwarded": lambda: participant.claim(session.share(view, to=participant)).forward(participant, meta=b"7"),
    }


@pytest.mark.parametrize("kind", ["addressed", "ticket", "many", "loan", "forwarded"])
def test_a_layout_that_a_carrier_altered_is_refused_and_the_true_one_stays_claimable(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant, kind: str
) -> None:
    # A loan ends with its object.
    kinds = sharing(session, participant)
    true = kinds[kind]()
    good = bytes(true)
    assert mended(good) == good
    with gpu_ipc.connect(session.path) as other:
        # It maps nothing before its first claim.
        claimer = other if true.is_ticket else participant
        pinned = session.stats().source.pinned
        for bad in altered(good):
            with pytest.raises(gpu_ipc.BadDescriptor):
                gpu_ipc.Descriptor(bad)
            with pytest.raises(gpu_ipc.BadDescriptor):
                claimer.claim(bad, timeout=WATCHDOG)
            with pytest.raises(gpu_ipc.BadDescriptor):
                claimer.claim(mended(bad), timeout=WATCHDOG)
        assert session.stats().source.pinned == pinned
        received = claimer.claim(good, timeout=WATCHDOG)
        assert (received.dtype, received.shape, received.strides) == ("int16", (4, 3), (6, 2))
        assert numpy.asarray(received).tolist() == [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18, 20, 22]]
        received.release()


def test_the_layout_of_another_descriptor_is_refused(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    block = session.alloc(4096)
    array = numpy.from_dlpack(block).view(numpy.int16)
    first, second = (bytes(session.share(one, to=participant)) for one in (array, array.reshape(2, -1)))
    assert len(first) != len(second)
    for bad in (first[:GRANT] + second[GRANT:], first[:USER] + second[USER:]):
        for one in (bad, mended(bad)):
            with pytest.raises(gpu_ipc.BadDescriptor):
                participant.claim(one, timeout=WATCHDOG)
    # Nor by a library's descriptor that vouches for none.
    plain = bytearray(first[:GRANT])
    plain[USER:BEHIND] = bytes(BEHIND - USER)
    plain[FLAGS] = 0
    assert gpu_ipc.Descriptor(plain).dtype == "uint8"
    for one in (bytes(plain), bytes(plain) + first[GRANT:]):
        with pytest.raises(gpu_ipc.BadDescriptor):
            participant.claim(one, timeout=WATCHDOG)
    assert [participant.claim(one).shape for one in (first, second)] == [(2048,), (2, 1024)]


def test_many_with_one_altered_layout_are_refused_together_and_stay_claimable(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    arrays = [numpy.from_dlpack(session.alloc(64)).view(numpy.int16) for _ in range(3)]
    shared = session.share_many(arrays, to=participant)
    good = [bytes(one) for one in shared]
    # The second's dimension: 32 elements become 16.
    length = good[1].index((32).to_bytes(8, "little"), GRANT)
    bad = mended(good[1][:length] + b"\x10" + good[1][length + 1 :])
    with pytest.raises(gpu_ipc.BadDescriptor):
        participant.claim_many([good[0], bad, good[2]], timeout=WATCHDOG)
    raised = session.share_many(arrays, to=participant)
    results = participant.claim_many([raised[0], bad, raised[2]], timeout=WATCHDOG, return_exceptions=True)
    assert [type(one) for one in results] == [gpu_ipc.Received, gpu_ipc.BadDescriptor, gpu_ipc.Received]
    assert participant.claim(good[1]).shape == (32,)

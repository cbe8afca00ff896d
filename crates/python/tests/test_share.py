"""Sharing and claiming on one machine: what arrives, what is kept, what is refused."""

import gc
import pickle

import numpy
import pytest
from conftest import DEVICE, WATCHDOG, settled, until

import gpu_ipc


# What is not read without the key: from the device to the fence, the digest, and the keyed checksum.
KEYED = [*range(8, 104), *range(112, 176), *range(184, 192)]


def filled(session: gpu_ipc.Session, count: int) -> "numpy.ndarray":
    """Make an array of float32 in memory of a session."""
    array = numpy.from_dlpack(session.alloc(4 * count)).view(numpy.float32)
    array[:] = numpy.arange(count)
    return array


def test_an_array_arrives_as_it_is(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    array = filled(session, 24).reshape(2, 3, 4)
    for view in [array, array[1], array[:, 1:], array[:, ::2, 1:3], array.transpose(2, 0, 1), array[..., 0:0]]:
        descriptor = session.share(view, to=participant.id)
        assert (descriptor.shape, descriptor.dtype) == (view.shape, "float32")
        received = participant.claim(bytes(descriptor))
        assert (received.shape, received.dtype, received.nbytes) == (view.shape, "float32", view.nbytes)
        got = numpy.from_dlpack(received)
        assert got.dtype == view.dtype and got.shape == view.shape
        if view.size > 0:
            assert got.strides == view.strides
        assert numpy.array_equal(got, view)
        with memoryview(received) as seen:
            assert (seen.shape, seen.format) == (view.shape, "f")
            assert seen.tolist() == view.tolist()


def test_a_view_that_runs_backwards_arrives(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    array = filled(session, 6).reshape(2, 3)
    got = numpy.asarray(participant.claim(session.share(memoryview(array[::-1, ::-1]), to=participant.id)))
    assert numpy.array_equal(got, array[::-1, ::-1])


@pytest.mark.parametrize(
    "dtype",
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split(),
)
def test_every_type_of_element_arrives(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant, dtype: str
) -> None:
    array = numpy.from_dlpack(session.alloc(64)).view(dtype)
    array[:] = 1
    for given in (array, memoryview(array)):
        received = participant.claim(session.share(given, to=participant.id))
        assert received.dtype == dtype
        assert numpy.array_equal(numpy.from_dlpack(received), array)
    zero = array[0:1].reshape(())
    received = participant.claim(session.share(zero, to=participant.id))
    assert received.shape == () and numpy.from_dlpack(received) == 1
    with pytest.raises(TypeError):
        len(received)


def test_the_array_alone_keeps_the_lease(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    makers = (numpy.from_dlpack, numpy.asarray, lambda received: memoryview(received)[1:], lambda received: received)
    for make in makers:
        array = filled(session, 16)
        made = make(participant.claim(session.share(array, to=participant.id)))
        del array
        gc.collect()
        stats = session.stats()
        assert (stats.held, stats.limbo_blocks, stats.live_blocks) == (1, 1, 1)
        del made
        until(lambda: settled(session), "the lease ends with the array")


def test_a_released_array_leaves_what_was_made_of_it(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    with participant.claim(session.share(filled(session, 4), to=participant.id)) as received:
        made = numpy.from_dlpack(received)
        seen = memoryview(received)
    assert made.tolist() == [0, 1, 2, 3] and seen.tolist() == [0, 1, 2, 3]
    with pytest.raises(gpu_ipc.Invalid, match="released"):
        numpy.from_dlpack(received)
    assert session.stats().held == 1
    del made
    assert session.stats().held == 1
    seen.release()
    until(lambda: settled(session), "the lease ends with the last view")


def test_a_descriptor_is_bytes(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    array = filled(session, 6).reshape(2, 3)[:, ::2]
    descriptor = session.share(array, to=participant.id, meta=b"frame 17")
    assert pickle.loads(pickle.dumps(descriptor)) == descriptor
    assert gpu_ipc.Descriptor(bytes(descriptor)) == descriptor
    assert {descriptor, gpu_ipc.Descriptor(memoryview(descriptor))} == {descriptor}
    assert b"".join([descriptor]) == bytes(descriptor) and len(descriptor) == len(bytes(descriptor))
    assert (descriptor.meta, descriptor.is_ticket, descriptor.addressee) == (b"frame 17", False, participant.id)
    assert (descriptor.session, descriptor.strides, descriptor.nbytes) == (session.id, (3, 2), 16)
    assert repr(descriptor) == "<gpu_ipc.Descriptor addressed, float32[2, 2]>"
    assert participant.claim(descriptor).meta == b"frame 17"


def test_every_wrong_byte_of_a_descriptor_is_found(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    good = bytes(session.share(filled(session, 6), to=participant.id, meta=b"m"))
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x10
        # A header of another version is told apart, everything else is not a descriptor.
        if at not in KEYED:
            with pytest.raises((gpu_ipc.BadDescriptor, gpu_ipc.Mismatch)):
                gpu_ipc.Descriptor(bad)
        # One of another session or participant is refused by name.
        with pytest.raises((gpu_ipc.BadDescriptor, gpu_ipc.Mismatch, gpu_ipc.Refused)):
            participant.claim(bad)
    for length in range(len(good)):
        with pytest.raises(gpu_ipc.BadDescriptor):
            gpu_ipc.Descriptor(good[:length])
    assert participant.claim(good).shape == (6,)


def test_an_addressed_descriptor_is_claimed_once(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    descriptor = session.share(filled(session, 1), to=participant.id)
    received = participant.claim(descriptor)
    with pytest.raises(gpu_ipc.AlreadyClaimed) as caught:
        participant.claim(descriptor)
    assert caught.value.code == 103 and isinstance(caught.value, gpu_ipc.Error)
    received.release()


def test_a_ticket_is_claimed_so_often(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    block = session.alloc(64)
    with gpu_ipc.connect(session.path) as second:
        twice = session.share(block, to=session.ticket(2))
        held = [claimer.claim(twice, timeout=WATCHDOG) for claimer in (participant, second)]
        assert session.stats().held == 2
        always = session.share(block, to=session.ticket(None))
        held += [claimer.claim(always, timeout=WATCHDOG) for claimer in (participant, second)]
        block.release()
        with gpu_ipc.connect(session.path) as third, pytest.raises(gpu_ipc.Revoked):
            third.claim(always, timeout=WATCHDOG)
        del held
    until(lambda: settled(session), "every lease ends")


def test_many_are_shared_and_claimed_at_once(session: gpu_ipc.Session, participant: gpu_ipc.Participant) -> None:
    with gpu_ipc.connect(session.path) as second:
        arrays = {name: filled(session, 8) + n for n, name in enumerate("abc")}
        shared = {name: filled(session, 8) for name in arrays}
        for name, array in shared.items():
            array[:] = arrays[name]
        mine, theirs = session.share_many(shared.values(), to=[participant.id, second.id])
        held: list[gpu_ipc.Received] = []
        tickets = session.share_many(list(shared.values()), to=session.ticket(2))
        for claimer, descriptors in ((participant, mine), (second, theirs), (participant, tickets), (second, tickets)):
            received = claimer.claim_many(descriptors, timeout=WATCHDOG)
            held += received
            assert [numpy.from_dlpack(one).tolist() for one in received] == [a.tolist() for a in arrays.values()]
        good = session.share(shared["a"], to=participant.id)
        results = participant.claim_many([mine[0], good], return_exceptions=True)
        assert isinstance(results[0], gpu_ipc.AlreadyClaimed) and isinstance(results[1], gpu_ipc.Received)
        again = session.share(shared["a"], to=participant.id)
        with pytest.raises(gpu_ipc.AlreadyClaimed):
            participant.claim_many([again, mine[0]])
        del results, received, held, shared, array
        gc.collect()
    until(lambda: settled(session), "what the failed call claimed was released")


def test_descriptors_of_many_are_a_sequence_and_one_piece_of_bytes(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    arrays = [filled(session, n + 1).reshape(1, n + 1)[:, ::2] for n in range(5)]
    given = session.share_many(arrays, to=participant.id)
    assert isinstance(given, gpu_ipc.Descriptors) and repr(given) == "<gpu_ipc.Descriptors of 5 arrays>"
    singles = list(given)
    assert [one.shape for one in singles] == [array.shape for array in arrays] and len(given) == len(singles) == 5
    assert [given[n] for n in range(-5, 5)] == singles * 2 and singles[3] in given and b"" not in given
    for places in (slice(1, 4), slice(None, None, -2), slice(4, 1), slice(-2, 99)):
        part = given[places]
        assert list(part) == singles[places] and len(part) == len(singles[places])
        assert part == gpu_ipc.Descriptors(singles[places]) == gpu_ipc.Descriptors(map(bytes, singles[places]))
    for place in (5, -6, 1 << 80):
        with pytest.raises(IndexError):
            given[place]
    with pytest.raises(TypeError):
        given["0"]  # type: ignore[call-overload]
    copy = pickle.loads(pickle.dumps(given))
    assert copy == given and hash(copy) == hash(given) and copy != given[:4]
    # One object's pickle, and not one for each descriptor.
    assert len(pickle.dumps(given)) < len(bytes(given)) + 100
    assert gpu_ipc.Descriptors(memoryview(bytes(given))) == given
    received = participant.claim_many(copy[:3]) + participant.claim_many(copy[3:])
    assert all(numpy.array_equal(numpy.from_dlpack(one), array) for one, array in zip(received, arrays, strict=True))
    assert session.share_many([], to=participant.id) == gpu_ipc.Descriptors([]) and not gpu_ipc.Descriptors([])
    assert participant.claim_many(gpu_ipc.Descriptors([])) == []
    assert session.share_many(arrays, to=[]) == []


def test_every_wrong_byte_of_descriptors_is_found(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    array = filled(session, 6)
    shared = session.share_many([array, array[1:]], to=participant.id)
    good = bytes(shared)
    starts = (len(good) - len(shared[0]) - len(shared[1]), len(good) - len(shared[1]))
    # The claim alone finds those.
    keyed = {start + at for start in starts for at in KEYED}
    for at in (at for at in range(len(good)) if at not in keyed):
        bad = bytearray(good)
        bad[at] ^= 0x10
        with pytest.raises((gpu_ipc.BadDescriptor, gpu_ipc.Mismatch)):
            list(gpu_ipc.Descriptors(bad))
        with pytest.raises((gpu_ipc.BadDescriptor, gpu_ipc.Mismatch)):
            participant.claim_many(gpu_ipc.Descriptors(bytes(bad)))
    for length in range(len(good)):
        with pytest.raises(gpu_ipc.BadDescriptor):
            gpu_ipc.Descriptors(good[:length])
    # Numbers that no address reaches.
    for at in (8, 16, 24):
        for huge in (1 << 61, (1 << 64) - 1):
            with pytest.raises(gpu_ipc.BadDescriptor):
                gpu_ipc.Descriptors(good[:at] + huge.to_bytes(8, "little") + good[at + 8 :])
    for wrong in (17, object(), None):
        with pytest.raises(gpu_ipc.Invalid, match="iterable of descriptors"):
            gpu_ipc.Descriptors(wrong)  # type: ignore[arg-type]
    with pytest.raises(gpu_ipc.BadDescriptor):
        gpu_ipc.Descriptors(session.share(array, to=participant.id))
    with pytest.raises(gpu_ipc.Invalid):
        gpu_ipc.Descriptors([17])  # type: ignore[list-item]
    # None of them was claimed.
    assert [one.shape for one in participant.claim_many(gpu_ipc.Descriptors(good))] == [(6,), (5,)]


def test_an_array_of_a_session_is_shared_where_it_lies(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    block = session.alloc(4096)
    array = numpy.from_dlpack(block)
    got = numpy.from_dlpack(participant.claim(session.share(array[100:200], to=participant.id)))
    array[100:200] = 7
    assert (got == 7).all() and got.shape == (100,)
    assert session.stats().live_bytes == 4096


def test_a_block_comes_back_after_block_array_and_lease(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    block = session.alloc(64)
    array = numpy.asarray(block)
    received = participant.claim(session.share(block, to=participant.id))
    assert block.outstanding == 1
    with pytest.raises(gpu_ipc.Timeout):
        block.wait_released(timeout=0.01)
    received.release()
    block.wait_released(timeout=WATCHDOG)
    block.release()
    assert session.stats().live_blocks == 1
    del array
    until(lambda: settled(session), "the last array ends the block")


def test_memory_of_another_allocator_is_kept_until_the_last_lease_ends(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    from gpu_ipc._gpu_ipc import _PlainMemory

    released = []

    class Owner:
        """An array of another library."""

        def __init__(self) -> None:
            self.memory = _PlainMemory(1 << 16, "host:0")

        def __dlpack__(self, **keywords: object) -> object:
            return self.memory.__dlpack__(**keywords)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.memory.__dlpack_device__()

    owner = Owner()
    whole = numpy.from_dlpack(owner)
    whole[:] = numpy.arange(1 << 16, dtype=numpy.uint8)

    class Watched(numpy.ndarray):
        def __del__(self) -> None:
            released.append(True)

    view = whole[16:32].view(Watched)
    first = participant.claim(session.share(memoryview(view), to=participant.id))
    second = participant.claim(session.share(memoryview(view), to=participant.id))
    del view, whole, owner
    gc.collect()
    assert numpy.from_dlpack(first).tolist() == list(range(16, 32)) and not released
    second.release()
    session.collect()
    assert not released
    first.release()
    participant.close()
    until(lambda: bool(released), "the reference is dropped after the last lease")
    until(lambda: settled(session), "nothing is held")


def test_parts_of_a_segment_need_no_mapping_of_their_own(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    """PyTorch's pool hands out the parts of a segment, the first of which begins where the segment does."""
    from gpu_ipc._gpu_ipc import _Segment

    whole = numpy.from_dlpack(_Segment(session, 1 << 16))
    whole[:] = numpy.arange(1 << 16, dtype=numpy.uint8)
    for round in range(2):
        for part in (whole[:256], whole[256:], whole[1:9], whole.reshape(256, 256).T):
            received = participant.claim(session.share(part, to=participant.id))
            assert numpy.array_equal(numpy.from_dlpack(received), part)
            assert (participant.mappings, session.stats().source.regions) == (1, 1), (round, part.shape)
    del whole, part, received
    until(lambda: settled(session), "the segment ends with the last part")


def test_what_cannot_be_shared_is_refused_with_the_remedy(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    ordinary = numpy.arange(12.0).reshape(3, 4)
    with pytest.raises(gpu_ipc.Unsupported, match="copy=True"):
        session.share(ordinary, to=participant.id)
    got = participant.claim(session.share(ordinary[:, 1:], to=participant.id, copy=True))
    assert numpy.array_equal(numpy.from_dlpack(got), ordinary[:, 1:])
    with pytest.raises(gpu_ipc.Invalid, match="array"):
        session.share(object(), to=participant.id)
    with pytest.raises(gpu_ipc.Invalid, match="addressee"):
        session.share(ordinary, to="reader")  # type: ignore[arg-type]
    with pytest.raises(gpu_ipc.ParticipantGone):
        session.share(session.alloc(1), to=gpu_ipc.ParticipantId(77 << 12))
    with pytest.raises(gpu_ipc.Invalid, match="another session"), gpu_ipc.Session("host:0") as other:
        session.share(other.alloc(1), to=participant.id)


def test_descriptors_travel_as_a_buffer_and_are_claimed_as_bytes(
    session: gpu_ipc.Session, participant: gpu_ipc.Participant
) -> None:
    blocks = [session.alloc(n + 1) for n in range(3)]
    for form in (gpu_ipc.Descriptors, bytes, bytearray, memoryview, list):
        descriptors = session.share_many(blocks)
        view = memoryview(descriptors)
        assert view.readonly and bytes(view) == bytes(descriptors)
        assert [len(one) for one in participant.claim_many(form(descriptors))] == [1, 2, 3]
    # Bytes of one are no list.
    with pytest.raises(gpu_ipc.BadDescriptor, match="list of descriptors"):
        participant.claim_many(bytes(descriptors[0]))


def test_an_array_that_its_library_does_not_give_out_says_what_to_do(session: gpu_ipc.Session) -> None:
    with pytest.raises(gpu_ipc.Unsupported, match="view") as caught:
        session.share(numpy.zeros(4, ">i4"), copy=True)
    assert isinstance(caught.value.__cause__, BufferError)


@pytest.mark.skipif(not DEVICE.startswith("host"), reason="of a session on the host")
def test_an_array_of_this_process_alone_is_refused_without_a_copy(session: gpu_ipc.Session) -> None:
    with pytest.raises(gpu_ipc.Unsupported, match="this process alone.*copy=True"):
        session.share(numpy.arange(10))

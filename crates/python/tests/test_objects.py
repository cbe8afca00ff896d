"""Objects of a broker: put, filled in place, opened, advanced, asleep and awake, watched, and what is refused."""

import asyncio
import os
import pathlib
import signal
from collections.abc import Callable, Mapping

import numpy
import pytest
from conftest import DEVICE, WATCHDOG, ends, interrupted, said, serve, until

import gpu_ipc


def weights(value: float) -> dict[str, numpy.ndarray]:
    return {
        "layer.0.weight": numpy.full((4, 6), value, numpy.float32),
        "layer.0.bias": numpy.full(4, value + 1, numpy.float64),
        "step": numpy.array(int(value)),
    }


def test_what_is_put_is_there_whole(broker: gpu_ipc.Broker, directory: pathlib.Path) -> None:
    given = weights(3)
    assert broker.put("model", given, meta=b"step 3") == 1
    with gpu_ipc.connect_broker(directory, DEVICE) as other:
        model = other.open("model")
        assert isinstance(model, Mapping) and dict(model).keys() == given.keys() == set(model.keys())
        assert (model.name, model.epoch, model.meta, len(model), model.asleep) == ("model", 1, b"step 3", 3, False)
        assert "step" in model and "no" not in model and list(model) == sorted(given)
        for name, part in model.items():
            made = numpy.from_dlpack(part)
            assert made.dtype == given[name].dtype and numpy.array_equal(made, given[name])
            assert not made.flags.writeable and memoryview(part).readonly
            assert (part.shape, part.nbytes) == (given[name].shape, given[name].nbytes)
        with pytest.raises(KeyError):
            model["no"]
    # The addresses stay as long as somebody has an array.
    del model
    assert numpy.array_equal(made, given[name])


def test_views_and_nested_names_arrive(broker: gpu_ipc.Broker) -> None:
    base = numpy.arange(24.0).reshape(4, 6)
    parts = {"model": {"w": base[:, ::2], "t": base.T}, "optimizer": {"state": {"m": base[1:3]}}, "empty": base[:0]}
    broker.put("all", parts)
    opened = broker.open("all")
    assert opened.keys() == ["empty", "model/t", "model/w", "optimizer/state/m"]
    assert numpy.array_equal(opened["model/w"], base[:, ::2]) and numpy.array_equal(opened["model/t"], base.T)
    assert numpy.array_equal(opened["optimizer/state/m"], base[1:3]) and opened["empty"].shape == (0, 6)
    from gpu_ipc._objects import nested

    assert nested(opened)["optimizer"]["state"]["m"].shape == (2, 6)
    for bad in ({"a/b": base}, {"": base}, {1: base}, {"a": {}}, [base]):
        with pytest.raises(gpu_ipc.Invalid):
            broker.put("bad", bad)  # type: ignore[arg-type]
    with pytest.raises(gpu_ipc.Unsupported, match="contiguous"):
        broker.put("bad", {"w": memoryview(base[::-1])})
    with pytest.raises(gpu_ipc.NotFound):
        broker.open("bad")


def test_an_object_is_filled_in_place(broker: gpu_ipc.Broker) -> None:
    like = numpy.empty((2, 3), numpy.int32)
    with broker.create("made", {"a": like, "b": ("bfloat16", (5,))}, expect=0) as writer:
        assert writer.keys() == ["a", "b"] and writer["b"].dtype == "bfloat16"
        array = numpy.from_dlpack(writer["a"])
        array[:] = numpy.arange(6).reshape(2, 3)
        with pytest.raises(gpu_ipc.NotFound):
            broker.open("made")
        with pytest.raises(gpu_ipc.Invalid, match="alive"):
            writer.commit()
        del array
        assert writer.commit() == 1
    with pytest.raises(gpu_ipc.Invalid, match="committed"):
        writer.commit()
    assert numpy.array_equal(broker.open("made")["a"], numpy.arange(6).reshape(2, 3))
    with broker.create("aborted", {"a": like}):
        pass
    with pytest.raises(gpu_ipc.NotFound):
        broker.open("aborted")
    with pytest.raises(gpu_ipc.Conflict):
        broker.put("made", {"a": like}, expect=0)
    with pytest.raises(gpu_ipc.Invalid, match="bfloat16"):
        broker.create("bad", {"a": ("float12", (1,))})


def test_arrays_keep_the_addresses_and_not_the_epoch(broker: gpu_ipc.Broker) -> None:
    broker.put("model", weights(1))
    model = broker.open("model")
    array = numpy.from_dlpack(model["layer.0.weight"])
    at = model["layer.0.weight"].data_ptr
    assert (array == 1).all() and model.advance() is False
    broker.put("model", weights(2))
    assert (array == 1).all()
    assert model.advance() is True and model.epoch == 2
    assert (array == 2).all() and model["layer.0.weight"].data_ptr == at
    model.sleep()
    assert model.asleep and "asleep" in repr(model)
    model.wake()
    assert (array == 2).all()
    model.sleep(release=True)
    broker.put("model", weights(3))
    model.wake(3)
    assert (array == 3).all() and model.epoch == 3
    assert model.advance(2) is True and (array == 2).all()
    broker.put("model", {"other": numpy.zeros(1)})
    with pytest.raises(gpu_ipc.LayoutDiffers):
        model.advance()
    assert model.epoch == 2 and (array == 2).all()
    assert broker.remove("model") == 4
    assert (array == 2).all()
    with pytest.raises(gpu_ipc.NotFound):
        broker.open("model")


def test_a_newer_epoch_is_waited_for(broker: gpu_ipc.Broker) -> None:
    assert broker.watch("model", timeout=0.01) is None

    async def main() -> list[int]:
        async with asyncio.timeout(WATCHDOG):
            first = asyncio.create_task(broker.watch_async("model"))
            await asyncio.sleep(0)
            put = await asyncio.to_thread(broker.put, "model", weights(1))
            second = asyncio.create_task(broker.watch_async("model", put))
            await asyncio.to_thread(broker.put, "model", weights(2))
            return [await first, await second]

    assert asyncio.run(main()) in ([1, 2], [2, 2])
    assert broker.watch("model", 1) == 2


def test_the_listing_says_who_reads(broker: gpu_ipc.Broker) -> None:
    broker.put("model", weights(1))
    model = broker.open("model")
    (row,) = broker.listing()["objects"]
    assert (row["name"], row["epoch"], row["state"]) == ("model", 1, "visible")
    assert [reader["name"] for reader in row["readers"]] == ["the test"]
    del model


def test_parts_that_stay_are_taken_over(broker: gpu_ipc.Broker) -> None:
    base = {"w": numpy.arange(1 << 16), "b": numpy.ones(300)}
    groups = [["base"], ["adapter"]]
    broker.put("model", {"base": base, "adapter": {"a": numpy.zeros(5)}, "step": numpy.array(1)}, groups=groups)
    model = broker.open("model")
    at = model["base/w"].data_ptr
    one = broker.listing()["bytes"]
    # Of what stays neither contents nor an array is needed.
    pairs = {"w": ("int64", (1 << 16,)), "b": ("float64", (300,))}
    new: dict[str, object] = {"base": pairs, "adapter": {"a": numpy.ones(5)}, "step": numpy.array(2)}
    assert broker.put("model", new, groups=groups, unchanged=["base"]) == 2
    assert 0 < broker.listing()["bytes"] - one < one, "the base is there once"
    assert (numpy.from_dlpack(model["adapter/a"]) == 0).all()
    assert model.advance() and model["base/w"].data_ptr == at
    assert numpy.array_equal(model["base/w"], base["w"]) and numpy.array_equal(model["base/b"], base["b"])
    assert (numpy.from_dlpack(model["adapter/a"]) == 1).all() and numpy.asarray(model["step"]) == 2

    with broker.create("model", new, groups=groups, unchanged=["base/w", "base/b"], expect=2) as writer:
        assert writer["base/w"].read_only and not writer["adapter/a"].read_only
        assert numpy.array_equal(writer["base/w"], base["w"])
        adapter = numpy.from_dlpack(writer["adapter/a"])
        adapter[:] = 3
        step = numpy.from_dlpack(writer["step"])
        step[...] = 3
        del adapter, step
        assert writer.commit() == 3
    assert model.advance() and (numpy.from_dlpack(model["adapter/a"]) == 3).all()
    assert numpy.array_equal(model["base/b"], base["b"])

    for wrong, text in (
        ({"unchanged": ["no"]}, "no, which the layout does not have"),
        ({"unchanged": ["base/w"]}, "and not base/b"),
        ({"groups": [["base"], ["base/w"]]}, "`base/w` twice"),
        ({"groups": [["no"]]}, "`no`"),
        ({"groups": [[f"{n}"] for n in range(17)]}, "`0`"),
    ):
        with pytest.raises(gpu_ipc.Invalid, match=text):
            broker.create("model", new, **{"groups": groups, **wrong})  # type: ignore[arg-type]
    with pytest.raises(gpu_ipc.Invalid, match="number of regions"):
        broker.put("many", {f"{n}": numpy.zeros(1) for n in range(17)}, groups=[[f"{n}"] for n in range(17)])
    with pytest.raises(gpu_ipc.NotFound, match="no epoch to take parts over from"):
        broker.put("other", new, groups=groups, unchanged=["base"])
    with pytest.raises(gpu_ipc.Refused, match="differs from epoch 3"):
        changed = {**new, "base": {"w": ("int32", (1 << 17,)), "b": pairs["b"]}}
        broker.put("model", changed, groups=groups, unchanged=["base"])
    assert broker.open("model").epoch == 3


def test_a_part_is_copied_into_another_object(broker: gpu_ipc.Broker) -> None:
    broker.put("model", weights(3))
    model = broker.open("model")
    with broker.create("other", {**weights(0), "more": numpy.zeros(2)}) as writer:
        bias = numpy.from_dlpack(writer["layer.0.bias"])
        bias[:] = 7
        # While an array of another part is alive, too.
        model.copy_part("layer.0.weight", writer)
        with pytest.raises(gpu_ipc.Invalid, match="more, which model does not have"):
            model.copy_part("more", writer)
        del bias
        writer.commit()
        with pytest.raises(gpu_ipc.Invalid, match="committed"):
            model.copy_part("layer.0.weight", writer)
    other = broker.open("other")
    assert (numpy.from_dlpack(other["layer.0.weight"]) == 3).all()
    assert (numpy.from_dlpack(other["layer.0.bias"]) == 7).all()
    with broker.create("short", {"layer.0.bias": numpy.zeros(1)}) as writer:
        with pytest.raises(gpu_ipc.Invalid, match="32 bytes for layer.0.bias, which has 8"):
            model.copy_part("layer.0.bias", writer)
        model.sleep()
        with pytest.raises(gpu_ipc.Asleep):
            model.copy_part("step", writer)


def test_a_copy_may_be_written_to(broker: gpu_ipc.Broker) -> None:
    given = weights(4)
    broker.put("model", given)
    model = broker.open("model")
    before = broker.listing()["bytes"]
    copy = model.writable_copy()
    assert isinstance(copy, Mapping) and copy.keys() == model.keys() and len(copy) == 3 and "3 parts" in repr(copy)
    assert broker.listing()["bytes"] > before, "it counts against the limits"
    assert all(numpy.array_equal(part, given[name]) for name, part in copy.items())
    array = numpy.from_dlpack(copy["layer.0.weight"])
    assert array.flags.writeable
    array[:] = 9
    assert (numpy.from_dlpack(model["layer.0.weight"]) == 4).all()
    # The array alone keeps it.
    del copy
    assert (array == 9).all()
    del array
    until(lambda: broker.listing()["bytes"] == before, "the copy is given back")

    memory = broker.scratch("workspace", {"a": ("float16", (3, 5)), "b": given["step"]})
    assert memory["a"].shape == (3, 5) and "a" in memory and "c" not in memory and list(memory) == ["a", "b"]
    assert len(memory.values()) == 2
    with pytest.raises(KeyError):
        memory["c"]
    with pytest.raises(gpu_ipc.NotFound):
        broker.open("workspace")
    model.sleep()
    with pytest.raises(gpu_ipc.Asleep):
        model.writable_copy()


def test_addresses_that_are_lost_say_so(directory: pathlib.Path) -> None:
    """What a move took off the addresses and nothing could be put on: a process at its limit of addresses."""
    program = f"""
import resource, numpy, gpu_ipc
broker = gpu_ipc.connect_broker({str(directory)!r}, "host:0", timeout={WATCHDOG})
broker.put("model", {{"w": numpy.ones(64)}})
model = broker.open("model")
array = numpy.from_dlpack(model["w"])
model.sleep()
model.wake()
before = resource.getrlimit(resource.RLIMIT_AS)
told = None
resource.setrlimit(resource.RLIMIT_AS, (1, before[1]))
try:
    while told is None:
        try:
            model.sleep()
        except gpu_ipc.Poisoned as error:
            told = error
        except (gpu_ipc.SystemFailed, MemoryError):
            # Its thread needs the stack of one that has ended.
            pass
finally:
    resource.setrlimit(resource.RLIMIT_AS, before)
assert told.code == 206, repr(told)
assert "model" in str(told) and "RLIMIT_AS" in str(told) and "open" in str(told), told
broker.put("model", {{"w": numpy.zeros(64)}})
for call in (model.advance, model.wake, model.sleep):
    try:
        call()
        raise AssertionError(call)
    except gpu_ipc.Poisoned as error:
        assert "model" in str(error), error
assert model.asleep and model.epoch == 1
# As the text says: opened anew it is whole, and this process goes on.
assert not numpy.from_dlpack(broker.open("model")["w"]).any()
"""
    assert said(program) == (0, "", "")


def test_readers_go_on_when_the_broker_dies(directory: pathlib.Path) -> None:
    second = directory.parent / "second"
    second.mkdir(mode=0o700)
    server = serve(second)
    broker = gpu_ipc.connect_broker(second, DEVICE, timeout=WATCHDOG)
    broker.put("model", weights(1))
    array = numpy.from_dlpack(broker.open("model")["layer.0.weight"])
    writer = broker.create("unfinished", {"a": numpy.zeros(4)})
    server.send_signal(signal.SIGKILL)
    server.wait()
    assert (array == 1).all()
    with pytest.raises((gpu_ipc.WriterLost, gpu_ipc.Timeout)):
        writer.commit()
    # There was no keeper, so its successor has nothing; the connection finds it by itself.
    server = serve(second)
    until(lambda: broker.listing()["objects"] == [], "the client finds the next broker")
    assert broker.put("model", weights(2)) >= 1
    assert (array == 1).all()
    broker.close()
    server.kill()
    server.wait()


def test_without_a_broker_it_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(gpu_ipc.ConnectFailed, match="broker"):
        gpu_ipc.connect_broker(tmp_path, DEVICE)


def test_a_forked_child_is_refused(broker: gpu_ipc.Broker, tmp_path: pathlib.Path) -> None:
    broker.put("model", weights(1))
    model = broker.open("model")
    asleep = broker.open("model")
    asleep.sleep()
    array = numpy.from_dlpack(model["layer.0.weight"])
    writer = broker.create("filled", {"a": numpy.zeros(4)})
    log = tmp_path / "log"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attempts: list[Callable[[], object]] = [
                lambda: broker.open("model"),
                lambda: broker.put("m", weights(1)),
                lambda: broker.create("m", weights(1)),
                lambda: broker.watch("m", timeout=WATCHDOG),
                lambda: broker.listing(),
                lambda: broker.remove("model"),
                lambda: model.advance(),
                lambda: model.sleep(),
                lambda: asleep.wake(),
                lambda: model.writable_copy(),
                lambda: model.copy_part("step", writer),
                lambda: broker.scratch("m", weights(1)),
                lambda: writer.commit(),
            ]
            for place, attempt in enumerate(attempts):
                try:
                    attempt()
                except gpu_ipc.Forked as error:
                    assert "in the child" in str(error), error
                else:
                    raise AssertionError(f"attempt {place} was let through")
            code = 0
        except BaseException as error:
            log.write_text(repr(error))
        finally:
            # The parent's objects die here: nothing of them may change.
            del array, model, asleep, writer, broker
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, log.read_text()
    assert (array == 1).all()
    asleep.wake()
    assert (numpy.from_dlpack(asleep["layer.0.weight"]) == 1).all()
    assert writer.commit() == 1 and broker.open("filled")["a"].shape == (4,)


# Makes one of everything; the broker's directory and process are arguments of the template.
EVERYTHING = """
import os, signal, numpy, gpu_ipc
broker = gpu_ipc.connect_broker({directory!r}, "host:0", timeout=600.0)
broker.put("model", {{"w": numpy.ones((2, 3)), "b": numpy.zeros(3)}})
model = broker.open("model")
part = model["w"]
view = numpy.from_dlpack(part)
seen = memoryview(model["b"])
writer = broker.create("made", {{"a": ("float32", (4,))}})
copy = model.writable_copy()
own = numpy.from_dlpack(copy["w"])
"""


@pytest.mark.parametrize(
    "wait",
    [
        "broker.open('model')",
        "broker.put('other', {'a': numpy.ones(1)})",
        "broker.create('other', {'a': numpy.ones(1)})",
        "broker.watch('nobody')",
        "broker.listing()",
        "broker.remove('model')",
        "broker.close(); gpu_ipc.connect_broker(directory, 'host:0', timeout=600.0)",
        "writer.commit()",
        "model.advance()",
        "released.wake()",
        "model.writable_copy()",
        "broker.scratch('s', {'a': numpy.ones(1)})",
        "abandoned.epoch",
    ],
)
def test_ctrl_c_ends_every_wait(wait: str, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "broker"
    directory.mkdir(mode=0o700)
    server = serve(directory)
    program = f"""
directory = {str(directory)!r}
{EVERYTHING.format(directory=str(directory))}
released = broker.open("model")
released.sleep(release=True)
stop({server.pid})
if "abandoned" in {wait!r}:
    # A move that somebody gave up still has the object.
    abandoned = model
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1)
        abandoned.advance()
    except KeyboardInterrupt:
        pass
"""
    try:
        interrupted(program, wait, "pass")
    finally:
        server.kill()
        server.wait()


ENDS = ends(
    "broker, model, part, view, seen, writer, array, copy, own",
    "assert broker.open('model').advance() is False and writer['a'].shape == (4,)",
    "numpy.from_dlpack(broker.open('model')['w']); broker.listing(); model.advance()",
)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_interpreter_ends_quietly(end: str, directory: pathlib.Path) -> None:
    program = f"""
{EVERYTHING.format(directory=str(directory))}
array = numpy.from_dlpack(writer["a"])
array[:] = 1
{end}
"""
    assert said(program) == (0, "", "")
    # What it left is aborted, and what it committed stays.
    with gpu_ipc.connect_broker(directory, DEVICE) as broker:
        assert broker.open("model").keys() == ["b", "w"]
        with pytest.raises(gpu_ipc.NotFound):
            broker.open("made")


def test_tensors_come_nested_and_keep_the_object(broker: gpu_ipc.Broker) -> None:
    torch = pytest.importorskip("torch")
    state = {"model": {"w": torch.arange(12.0).reshape(3, 4).t(), "h": torch.ones(3, dtype=torch.bfloat16)}}
    broker.put("state", state)
    opened = broker.open("state")
    with pytest.raises(gpu_ipc.Unsupported, match="tensors"):
        opened["model/w"].torch()
    got = opened.tensors()
    del opened
    assert got["model"]["h"].dtype == torch.bfloat16
    assert all(torch.equal(got["model"][name], state["model"][name]) for name in ("w", "h"))
    module = torch.nn.Linear(4, 3)
    broker.put("linear", module.state_dict())
    other = torch.nn.Linear(4, 3)
    other.load_state_dict(broker.open("linear").tensors())
    assert torch.equal(other.weight, module.weight)
    copied = broker.open("linear").writable_copy().tensors()
    copied["bias"].zero_()
    assert torch.equal(copied["weight"], module.weight) and not copied["bias"].any()
    with broker.create("filled", {"w": module.weight.detach()}) as writer:
        writer["w"].torch().copy_(module.weight.detach())
        writer.commit()
    assert torch.equal(broker.open("filled").tensors()["w"], module.weight)


def test_what_is_no_tree_of_arrays_is_refused(broker: gpu_ipc.Broker) -> None:
    for parts in ({}, {"a": {}}, {"a": {"b": {}}}):
        for call in (broker.put, broker.create, broker.scratch):
            with pytest.raises(gpu_ipc.Invalid, match="is empty, but must hold a part"):
                call("model", parts)
    # What an optimizer's state is made of.
    with pytest.raises(gpu_ipc.Invalid, match="key is 0, .* the rest into `meta`"):
        broker.put("model", {"state": {0: numpy.zeros(2)}})
    for value in (1, 0.5, [1, 2], "text", None, True):
        with pytest.raises(gpu_ipc.Invalid, match="`?meta`?"):
            broker.put("model", {"lr": value})
    assert broker.listing()["objects"] == []

"""Proof of a worker's death for LMCache's server, `docs/integrations/LMCACHE.md`: its memory comes back at once.

Both halves are named on a command line and nothing else is changed::

    lmcache server --server-module '{"module_path": "gpu_ipc.integrations.lmcache"}' ...
    vllm serve ... "kv_connector_module_path": "gpu_ipc.integrations.lmcache"

The server opens a session without GPU memory. Each worker connects to it under its ``instance_id`` before it registers its
caches, and deposits the descriptors of memory that has no other handle.
"""

import queue
import select
import threading
import time
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lmcache.logging import init_logger
from lmcache.v1.multiprocess.engine_module import InstanceLivenessTarget
from lmcache.v1.multiprocess.ext_server_module import server_module_handler
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

import gpu_ipc
from gpu_ipc.integrations._waits import complete

__all__ = ["Presence", "attach", "build_server_modules"]

# LMCache's, so that its server's log has what is said here.
logger = init_logger(__name__)

# The method by which a worker asks the server for its session.
_SESSION, _NAME = "gpu_ipc.session", "lmcache "
# Seconds between two looks at which workers live, and while a registration of the dead may still come.
_LOOK, _LOOK_AGAIN = 5.0, 0.2
# Seconds in which a registration may arrive that a worker sent before it died.
_LATE = 120.0
# Seconds that LMCache may take to unregister caches before the memory that they hold is reported.
_SLOW = 10.0


def build_server_modules(build: Any) -> "ProofOfDeath":
    """Return the module of the server; LMCache calls it with its `ExtServerModuleBuildContext`.

    ``config`` takes ``path``, where the session's socket is put, and ``allow_uids``, who besides this user may connect.
    """
    return ProofOfDeath(build)


class ProofOfDeath(InstanceLivenessTarget):  # type: ignore[misc]
    """A module of LMCache's server: workers that have died are unregistered at once, those that live are never reaped."""

    def __init__(self, build: Any) -> None:
        if unknown := build.config.keys() - {"allow_uids", "path"}:
            raise ValueError(f"the config of {__name__} has {sorted(unknown)}; it takes ['allow_uids', 'path']")
        self._context = build.server_context
        self._modules = build.modules
        self._owners = [module for module in build.modules if hasattr(module, "unregister_kv_cache")]
        self._stores = _Stores(build)
        # No time limit, and no memory: workers are present in it.
        self._session = gpu_ipc.Session("host:0", ttl=None, **build.config)
        # LMCache asks for the descriptors that workers deposited when it maps their memory.
        _set_resolver(self._session.fetch)
        # Until when registrations of the dead are looked for, by instance.
        self._dead: dict[int, float] = {}
        # The bytes of caches that are being unregistered, by instance.
        self._ending: dict[int, int] = {}
        self._queue: queue.SimpleQueue[tuple[int, threading.Timer]] = queue.SimpleQueue()
        self._ended = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-ipc-lmcache", daemon=True)
        self._thread.start()
        # It may wait for a stream that never ends.
        threading.Thread(target=self._end_each, name="gpu-ipc-lmcache-end", daemon=True).start()
        logger.info("workers' deaths are proven through %s", self._session.path)

    @property
    def context(self) -> Any:
        """The context of the server."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """Return what LMCache's ``/status`` shows."""
        return {
            "gpu_ipc": {
                "session": self._session.path,
                "workers": sorted(self._living()),
                "unregistered_after_death": self._ended,
                "unregistering": sorted(self._ending),
                "bytes_held": sum(self._ending.values()),
            }
        }

    def close(self) -> None:
        """End the session. Workers go on, and connect to the next one when they register again."""
        self._closing.set()
        self._thread.join()
        _set_resolver(None)
        self._session.close()

    @server_module_handler(_SESSION)  # type: ignore[untyped-decorator]
    def session(self, _payload: bytes) -> bytes:
        """Tell a worker where to connect."""
        return self._session.path.encode()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._session.fileno(), select.POLLIN)
        next_look = 0.0
        while not self._closing.is_set():
            poller.poll(1000 * _LOOK_AGAIN)
            try:
                for notice in self._session.notices():
                    self._note(notice)
                if self._dead or time.monotonic() >= next_look:
                    next_look = time.monotonic() + _LOOK
                    self._look()
            except Exception:
                # LMCache's own time limits are what is left of a worker whose turn failed.
                logger.exception("a look at the workers failed")

    def _note(self, notice: gpu_ipc.SessionNotice) -> None:
        instance = _instance(notice.name)
        if notice.kind == "failed":
            logger.error("the session has failed: LMCache's time limits alone end what workers leave")
        # A goodbye or a lost connection proves nothing. A worker that is back under its name lives.
        if notice.kind == "left" and notice.how == "died" and instance is not None and instance not in self._living():
            self._dead[instance] = time.monotonic() + _LATE
            logger.warning("worker %d has died: its caches are unregistered", instance)
            self._end(instance)

    def _look(self) -> None:
        living, registered = self._living(), self._registered()
        # Those that wait for their turn are not LMCache's to reap either: it would release them at once.
        for instance in (living | set(self._ending)) & registered:
            for owner in self._owners:
                owner.touch_instance(instance)
        now = time.monotonic()
        # An instance that is a process id may come again.
        self._dead = {it: until for it, until in self._dead.items() if until > now and it not in living}
        # Its registration was on its way when it died.
        for instance in self._dead.keys() & registered:
            self._end(instance)

    def _living(self) -> set[int]:
        names = [self._session.participant_name(participant) for participant in self._session.participants()]
        return {instance for name in names if (instance := _instance(name)) is not None}

    def _registered(self) -> set[int]:
        found: set[int] = set()
        for owner in self._owners:
            status = owner.report_status()
            for key in ("registered_gpu_ids", "registered_non_cuda_instance_ids"):
                found.update(status.get(key, ()))
        return found

    def _end(self, instance: int) -> None:
        """Have the caches of a dead worker unregistered, after those of workers that died before.

        LMCache waits for the stream of the caches, which the death of a worker may have left waiting. It releases memory after
        that, and CUDA then waits for all streams while no other thread can run Python: so one at a time, on one thread.
        """
        if instance not in self._ending and instance in self._registered():
            held = self._ending[instance] = self._stores.bury(instance)
            says = "worker %d is dead and LMCache still waits for streams after %g s: its %d bytes stay until they end"
            slow = threading.Timer(_SLOW, logger.error, (says, instance, _SLOW, held))
            slow.daemon = True
            slow.start()
            self._queue.put((instance, slow))

    def _end_each(self) -> None:
        while True:
            instance, slow = self._queue.get()
            try:
                try:
                    self._stores.end_waits(instance)
                except Exception:
                    logger.exception("what waits for worker %d, which is dead, waits on", instance)
                for owner in self._owners:
                    owner.unregister_kv_cache(instance)
                for module in self._modules:
                    if drop := getattr(module, "drop_instance_state", None):
                        drop(instance)
                self._ended += 1
            except Exception:
                logger.exception("the caches of worker %d, which is dead, cannot be unregistered", instance)
            finally:
                slow.cancel()
                self._ending.pop(instance)


class _Stores:
    """What streams of the server wait for by workers' events, and what they commit afterwards.

    An event is a word of the worker's (``--isolated-ipc``), which the server maps, or one of CUDA's. LMCache waits for the stream
    before it unregisters (LMCache#4676). So the words of a dead worker are written here, and what is copied then is not
    committed. Nothing but the worker completes an event of CUDA's.
    """

    def __init__(self, build: Any) -> None:
        from lmcache.v1.distributed.storage_manager import L1WriteCompletion
        from lmcache.v1.platform.base.cache_context import BaseCacheContext

        self._storage = build.server_context.storage_manager
        self._owners = [module for module in build.modules if hasattr(module, "context_entries_snapshot")]
        self._lock = threading.Lock()
        # Set once the worker is dead: of its caches, of each write that a stream will commit, and of what a thread stores.
        self._deaths: weakref.WeakKeyDictionary[Any, threading.Event] = weakref.WeakKeyDictionary()
        self._writes: dict[Any, threading.Event] = {}
        self._here = threading.local()
        hold, prepare = BaseCacheContext.hold_imported_event, self._storage.prepare_write_completion

        def hold_imported_event(context: Any, event: Any) -> int:
            death = self._here.death = self._death(context)
            token = int(hold(context, event))
            if death.is_set():
                complete(context.device, [event])
            return token

        def prepare_write_completion(objects: Any) -> Any:
            completion = prepare(objects)
            with self._lock:
                self._writes.update((_key(write), self._here.death) for write in completion)
            return completion

        BaseCacheContext.hold_imported_event = hold_imported_event
        self._storage.prepare_write_completion = prepare_write_completion
        for owner in self._owners:
            owner.register_host_func("finish_write_by_owner", self._finish, L1WriteCompletion)

    def _contexts(self, instance: int) -> list[Any]:
        return [entry.cache_context for owner in self._owners if (entry := owner.context_entries_snapshot().get(instance))]

    def _death(self, context: Any) -> threading.Event:
        with self._lock:
            return self._deaths.setdefault(context, threading.Event())

    def _finish(self, completion: Any) -> None:
        with self._lock:
            deaths = [death for write in completion if (death := self._writes.pop(_key(write), None))]
        if any(death.is_set() for death in deaths):
            # As LMCache treats a copy that failed: the reservation ends by its time to live.
            logger.warning("what a dead worker had not finished is not stored")
        else:
            self._storage.finish_write_by_owner(completion)

    def bury(self, instance: int) -> int:
        """Commit nothing more of a dead worker's, and return the bytes of its caches."""
        contexts = self._contexts(instance)
        for context in contexts:
            self._death(context).set()
        return sum(tensor.nbytes for context in contexts for tensor in context.kv_caches_)

    def end_waits(self, instance: int) -> None:
        """Complete what streams still wait for of a dead worker's."""
        for context in self._contexts(instance):
            with context._held_imports_lock:
                events = list(context._held_imports.values())
            complete(context.device, events)


def _key(write: Any) -> Any:
    """Name a write: an object is reserved for one at a time."""
    return write[0], write[1][0]


def _set_resolver(resolver: Callable[[bytes], int] | None) -> None:
    import_module("lmcache.v1.platform.devices.cuda.ipc_wrapper").set_vmm_fd_resolver(resolver)


def _instance(name: str | None) -> int | None:
    digits = name.removeprefix(_NAME) if name and name.startswith(_NAME) else ""
    return int(digits) if digits.isdecimal() else None


class Presence:
    """Where a worker's process is present, so that its death can be proven; it ends with the process."""

    def __init__(self, client: Any, timeout: float = 10.0) -> None:
        self._client, self._timeout, self._lock = client, timeout, threading.Lock()
        self._participants: dict[int, gpu_ipc.Participant] = {}

    def ensure(self, instance: int) -> gpu_ipc.Participant:
        """Connect under the name of an instance, unless that was done and the server has not ended since."""
        with self._lock:
            kept = self._participants.get(instance)
            if kept is None or kept.is_producer_gone:
                kept = gpu_ipc.connect(self._ask(), timeout=self._timeout, name=f"{_NAME}{instance}")
                self._participants[instance] = kept
            return kept

    def _ask(self) -> str:
        remedy = f"""start it with --server-module '{{"module_path": "{__name__}"}}'"""
        try:
            asked = self._client.server_module_call(ServerModuleCallRequest(method=_SESSION, payload=b""))
            answer = asked.result(timeout=self._timeout)
        except TimeoutError as error:
            raise ConnectionError(f"LMCache's server names no session of gpu_ipc in {self._timeout} s: {remedy}") from error
        if not answer.success:
            raise ConnectionError(f"LMCache's server names no session of gpu_ipc ({answer.error}): {remedy}")
        return str(answer.payload.decode())


def attach(client: Any, timeout: float = 10.0) -> Presence:
    """Have each registration that goes through a worker's client of LMCache preceded by its presence.

    This is for an engine without a connector here: ``attach(adapter.req_client)`` before caches are registered. Registrations
    that come again after the server's restart are covered. ConnectionError: the server does not run this module.
    """
    presence = Presence(client, timeout)
    with_handles, without = client.register_kv_cache, client.register_kv_cache_engine_driven_context

    def register_kv_cache(instance_id: int, kv_cache: Any, *rest: Any, **more: Any) -> Any:
        participant = presence.ensure(instance_id)
        for wrapper in kv_cache:
            # One that has no other handle: the server fetches it when it maps.
            if deposit := getattr(wrapper, "fd_payload", lambda: None)():
                participant.deposit(*deposit, timeout=timeout)
                wrapper.close()
        return with_handles(instance_id, kv_cache, *rest, **more)

    def register_kv_cache_engine_driven_context(payload: Any, *rest: Any, **more: Any) -> Any:
        presence.ensure(payload.instance_id)
        return without(payload, *rest, **more)

    client.register_kv_cache = register_kv_cache
    client.register_kv_cache_engine_driven_context = register_kv_cache_engine_driven_context
    return presence


def __getattr__(name: str) -> Any:
    # vLLM loads its connector by this name; the server has no vLLM.
    if name != "LMCacheMPConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lmcache.integration.vllm import lmcache_mp_connector

    class LMCacheMPConnector(lmcache_mp_connector.LMCacheMPConnector):  # type: ignore[misc]
        """LMCache's connector, whose worker is present in the server's session before its caches are registered."""

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            """Connect, and do what LMCache's does."""
            if not hasattr(self, "_presence"):
                self._presence = attach(self.worker_adapter.req_client)
            super().register_kv_caches(kv_caches)

    LMCacheMPConnector.__qualname__ = name
    globals()[name] = LMCacheMPConnector
    return LMCacheMPConnector

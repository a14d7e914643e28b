"""A whole box on one machine: Redis, service and workers, started, supervised and stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import Final

from gradbox.protocol import OperationMode, OperationView
from gradbox_service.database.connection import connect
from gradbox_service.fleet.operation import Operation
from gradbox_service.http.listening import bind, check_exposure, url_of
from gradbox_service.settings import EMBEDDED, Settings, arguments_of
from gradbox_service.up.console import NotReady, how_to_reach, say, what_is_there
from gradbox_service.up.data_folder import Credentials, lock_folder, takes_changes
from gradbox_service.up.devices import CLUSTER, Cluster
from gradbox_service.up.embedded_redis import EmbeddedRedis
from gradbox_service.up.processes import Part, PartFailed, Script, ended, of_module, rotate
from gradbox_service.up.watchdog import Watchdog, why_not_ready

READY: Final = "gradbox ready at"
# Of a box in the background, among the logs of the parts.
LOG: Final = "up.log"
LOOK_S: Final = 0.1
# A worker stops within a shard; what takes longer is killed, and its job is queued again.
WORKER_STOP_S: Final = 45.0
SERVICE_STOP_S: Final = 15.0


class Box:
    """One box.

    Args:
        devices: the device of each worker, where there is no cluster.
        build_timeout_s: how long a model may take to be built; None is what workers take it to be.
        cluster: whose devices run the jobs, in place of workers.
        public_url: how others reach the box, where the owner knows better than the machine.
        script: what runs while the box is up; the box ends with it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        models_file: Path,
        devices: Sequence[str],
        build_timeout_s: float | None = None,
        cluster: Cluster | None = None,
        public_url: str | None = None,
        script: Script | None = None,
    ) -> None:
        self._settings = settings
        self._data = settings.data.resolve()
        self._models_file = models_file
        self._devices = devices
        self._build_timeout_s = build_timeout_s
        self._cluster = cluster
        self._public_url = public_url
        self._script = script
        self._stop = threading.Event()
        self._num_signals = 0
        self._parts: list[Part] = []

    def run(self) -> int:
        """Start everything, keep it running, and stop it in order when asked to.

        Returns:
            0, or the exit code of the script.

        Raises:
            DataInUse, CannotListen, NoRedis, BadSettings: it cannot start here; nothing was left
                running.
            PartFailed: a part ended before jobs could run; the rest was stopped.
        """
        warning = check_exposure(self._settings)
        if warning is not None:
            say(warning)
        self._settings.make_data_folder()
        with ExitStack() as stack:
            stack.callback(os.close, lock_folder(self._data))
            self._data.chmod(0o700)
            bound = stack.enter_context(bind(self._settings.host, self._settings.port))
            numbers = [signal.SIGINT, signal.SIGTERM]
            # `nohup` has SIGHUP ignored, and means it.
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
            redis = EmbeddedRedis.start(
                self._data / "redis",
                appendfsync=self._settings.fsync,
                memory_bytes=self._settings.redis_memory_bytes,
                stopped=self._stop.is_set,
            )
            stack.callback(redis.stop)
            if self._stop.is_set():
                return self._stopped()
            self._parts = [redis.part]
            url = url_of(bound, tls=self._settings.tls_cert is not None)
            credentials = Credentials(self._data)
            token = credentials.owner_token(redis.url)
            credentials.withdraw()  # what a killed `up` left
            with takes_changes(self._data):
                operation = end_drain(redis.url)
            if operation.mode is OperationMode.PAUSED:
                say(f"the box is {operation}; `gradbox resume` lets jobs run")
            service = self._service(bound, redis.url)
            if self._cluster is None:
                workers = [self._worker(*w, redis_url=redis.url) for w in enumerate(self._devices)]
                what = f"{len(workers)} worker(s)"
            else:
                workers, what = [self._head(self._cluster, redis.url)], "a cluster"
            say(f"starting a service and {what}; logs in {service.log.parent}")
            stack.callback(self._stop_parts, [service], within_s=SERVICE_STOP_S)
            stack.callback(self._stop_parts, workers, within_s=WORKER_STOP_S)
            for part in (service, *workers):
                self._parts.append(part)
                part.start()
            if self._until(lambda: self._why_not_ready(url), before="the box was ready"):
                stack.callback(credentials.withdraw)
                credentials.publish(url, token)
                self._say_ready(url, redis.url)
                if self._script is not None:
                    stack.callback(self._script.stop)
                    self._script.start(url=url, token=token, data=self._data)
                names = [worker.name for worker in workers]
                watchdog = Watchdog(url, redis_url=redis.url, workers=names)
                stack.enter_context(watchdog)
                while self._goes_on(watchdog):
                    self._keep_running(watchdog)
            return self._stopped()

    def _stopped(self) -> int:
        say("stopping")
        return 0 if self._script is None else self._script.stop()

    def _service(self, bound: socket.socket, redis_url: str) -> Part:
        settings = self._settings.model_copy(update={"data": self._data, "redis_url": redis_url})
        arguments = ["--fd", str(bound.fileno()), *arguments_of(settings, leave_out=EMBEDDED)]
        return Part(
            "service",
            of_module("gradbox_service", *arguments),
            log=self._data / "logs" / "service.log",
            pass_fds=[bound.fileno()],
        )

    def _worker(self, index: int, device: str, *, redis_url: str) -> Part:
        name = f"worker-{index}-{device.replace(':', '-')}"
        log = self._data / "logs" / f"{name}.device.log"
        own = ["--device", device, "--name", name, "--device-log", str(log)]
        if self._build_timeout_s is not None:
            own += ["--build-timeout-s", str(self._build_timeout_s)]
        return self._computing(name, "gradbox_worker", own, redis_url=redis_url)

    def _head(self, cluster: Cluster, redis_url: str) -> Part:
        own = ["--address", cluster.address, "--device", cluster.device]
        return self._computing(CLUSTER, "gradbox_worker.cluster", own, redis_url=redis_url)

    def _computing(self, name: str, module: str, own: Sequence[str], *, redis_url: str) -> Part:
        """Return a worker, or the head of a cluster, not started."""
        arguments = [*own, "--models", str(self._models_file), "--data", str(self._data)]
        arguments += ["--redis-url", redis_url]
        if self._settings.disk_reserve_bytes is not None:
            arguments += ["--disk-reserve-bytes", str(self._settings.disk_reserve_bytes)]
        return Part(name, of_module(module, *arguments), log=self._data / "logs" / f"{name}.log")

    def _why_not_ready(self, url: str) -> str | None:
        """Return what jobs wait for; of a cluster, what it said last."""
        why = why_not_ready(url)
        if why is None or self._cluster is None:
            return why
        head = self._parts[-1]
        last = next(reversed(head.lines()), "nothing yet")
        return f"the cluster waits for devices; its log ends with: {last}"

    def _until(self, why_not: Callable[[], str | None], *, before: str) -> bool:
        """Wait until nothing is waited for any more; False if asked to stop before.

        Args:
            why_not: returns what is waited for.
            before: what a part that ends meanwhile has ended before.

        Raises:
            PartFailed: a part ended.
        """
        not_ready = NotReady()
        while self._wait():
            for part in self._parts:
                code = part.exit_code()
                if code is not None:
                    raise PartFailed.of(part, f"{ended(code)} before {before}", code=code)
            why = why_not()
            if why is None:
                return True
            not_ready.because(why)
        return False

    def _wait(self) -> bool:
        """Wait a moment, and keep the logs short; False if asked to stop."""
        for log in (self._data / "logs" / LOG, *(part.log for part in self._parts)):
            with suppress(OSError):  # the box matters more than its logs
                rotate(log)
        return not self._stop.wait(LOOK_S)

    def _say_ready(self, url: str, redis_url: str) -> None:
        # Before `READY`, with which `--wait` ends.
        for line in what_is_there(redis_url, on_cluster=self._cluster is not None):
            say(line)
        # The script has stdout for itself.
        out = sys.stdout if self._script is None else sys.stderr
        print(f"{READY} {url}\n", end="", file=out, flush=True)
        host, public = self._settings.host, self._public_url
        say(how_to_reach(url, host=host, public_url=public, data=self._data))

    def _goes_on(self, watchdog: Watchdog) -> bool:
        """Wait a moment; False once the box is to end."""
        if not self._wait():
            return False
        if self._script is not None and self._script.exit_code() is not None:
            return False
        if watchdog.drained:
            say("drained: nothing runs any more")
            return False
        return True

    def _keep_running(self, watchdog: Watchdog) -> None:
        for part in self._parts:
            if watchdog.heard_s(part.name) > part.started_s:
                part.settle()
            if part.running and watchdog.hangs(part.name, started_s=part.started_s):
                say(f"{part.name} does not answer any more: killing it")
                part.signal(signal.SIGKILL)
            restart = part.keep_running()
            if restart:
                say(restart)

    def _stop_parts(self, parts: Sequence[Part], *, within_s: float) -> None:
        """End parts by SIGTERM; by SIGKILL when time is up or a second signal comes."""
        for part in parts:
            part.signal(signal.SIGTERM)
        deadline = time.monotonic() + within_s
        while any(part.running for part in parts):
            if time.monotonic() > deadline or self._num_signals > 1:
                for part in parts:
                    part.signal(signal.SIGKILL)
            time.sleep(LOOK_S / 4)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self._stop.set()


def end_drain(redis_url: str) -> OperationView:
    """Let a box run that drained before it was started again; return its mode then."""
    with closing(connect(redis_url)) as connection:
        operation = Operation(connection)
        if operation.read().mode is OperationMode.DRAINING:
            operation.set(OperationView())
        return operation.read()

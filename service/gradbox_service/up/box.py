"""A whole box on one machine: Redis, service and workers, started, supervised and stopped."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Final

from gradbox.protocol import OperationMode
from gradbox_service.http.listening import bind, check_exposure, url_of
from gradbox_service.settings import EMBEDDED, Settings, arguments_of
from gradbox_service.up.console import NotReady, how_to_reach, left_out, say
from gradbox_service.up.data_folder import Credentials, lock_folder, takes_changes
from gradbox_service.up.devices import Cluster, address_file, devices_now, num_devices
from gradbox_service.up.drain import Drain
from gradbox_service.up.embedded_redis import LOG as REDIS_LOG
from gradbox_service.up.embedded_redis import EmbeddedRedis, NoRedis
from gradbox_service.up.processes import Part, PartFailed, Script, ShortLogs, ended
from gradbox_service.up.watchdog import REDIS, Watchdog, why_not_ready

READY: Final = "gradbox ready at"
# Of a box in the background, among the logs of the parts.
LOG: Final = "up.log"
OTHER_LOGS: Final = (f"logs/{LOG}", f"redis/{REDIS_LOG}")
LOOK_S: Final = 0.1
# A worker stops within a shard; what takes longer is killed, and its job is queued again.
WORKER_STOP_S: Final = 45.0
SERVICE_STOP_S: Final = 15.0
CLUSTER_STOP_S: Final = 30.0
# What workers of a box with a cluster say that their device is.
CLUSTER: Final = "cluster"
# Between two starts of a Redis that does not start.
REDIS_PAUSE_S: Final = 5.0


class Box:
    """One box.

    Args:
        devices: the device of each worker; none given with a cluster is a worker for each of its,
            those that join later too.
        template: whether workers fork their device processes from one that has imported torch.
        build_timeout_s: how long a model may take to be built; None is what workers take it to be.
        cluster: whose devices run the jobs; None: those of the workers.
        public_url: how others reach the box, where the owner knows better than the machine.
        script: what runs while the box is up; the box ends with it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        models_file: Path,
        devices: Sequence[str],
        template: bool = True,
        build_timeout_s: float | None = None,
        cluster: Cluster | None = None,
        public_url: str | None = None,
        script: Script | None = None,
    ) -> None:
        self._settings = settings
        self._data = settings.data.resolve()
        self._models_file = models_file
        self._devices = devices
        self._template = template
        self._build_timeout_s = build_timeout_s
        self._cluster = cluster
        self._public_url = public_url
        self._script = script
        self._stop = threading.Event()
        self._num_signals = 0
        self._redis: EmbeddedRedis | None = None
        self._redis_pause_until_s = 0.0

    def run(self) -> int:
        """Start everything, keep it running, and stop it in order when told to.

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
            self._redis = self._start_redis()
            stack.callback(self._stop_redis)
            if self._stop.is_set():
                return self._stopped()
            url = url_of(bound, tls=self._settings.tls_cert is not None)
            credentials = Credentials(self._data)
            token = credentials.owner_token(self._redis.url)
            credentials.withdraw()  # what a killed `up` left
            drain = Drain(self._redis.url)
            stack.callback(drain.close)
            with takes_changes(self._data):
                operation = drain.forget()
            if operation.mode is OperationMode.PAUSED:
                say(f"the box is {operation}; `gradbox resume` lets jobs run")
            head, found = self._cluster_head(stack)
            if self._stop.is_set():
                return self._stopped()
            service = self._service(bound, self._redis.url)
            workers = [self._worker(*one) for one in enumerate(self._devices or found * [CLUSTER])]
            parts = [*head, service, *workers]
            say(f"starting a service and {len(workers)} worker(s); logs in {service.log.parent}")
            logs = [self._data / name for name in OTHER_LOGS] + [part.log for part in parts]
            stack.enter_context(ShortLogs(logs))
            stack.callback(self._stop_parts, [service], within_s=SERVICE_STOP_S)
            stack.callback(self._stop_parts, workers, within_s=WORKER_STOP_S)
            for part in (service, *workers):
                part.start()
            if not self._stop.is_set() and self._until_ready(url, parts):
                stack.callback(credentials.withdraw)
                credentials.publish(url, token)
                self._say_ready(url, self._redis.url)
                if self._script is not None:
                    stack.callback(self._script.stop)
                    self._script.start(url=url, token=token, data=self._data)
                names = [worker.name for worker in workers]
                watchdog = Watchdog(url, redis_url=self._redis.url, workers=names)
                stack.enter_context(watchdog)
                while self._goes_on(drain):
                    self._keep_redis(watchdog)
                    for worker in self._for_new_devices(workers):
                        worker.start()
                        watchdog.watch(worker.name)
                        workers.append(worker)
                        parts.append(worker)
                        logs.append(worker.log)
                    self._keep_running(parts, watchdog)
            return self._stopped()

    def _stopped(self) -> int:
        say("stopping")
        return 0 if self._script is None else self._script.stop()

    def _cluster_head(self, stack: ExitStack) -> tuple[list[Part], int]:
        """Start the head of the cluster, if there is to be one; returns how many devices it has."""
        if self._cluster is None:
            return [], 0
        head = self._cluster.part(data=self._data, models_file=self._models_file)
        stack.callback(self._stop_parts, [head], within_s=CLUSTER_STOP_S)
        say(f"starting a cluster; its log is {head.log}")
        head.start()
        found = num_devices(head, data=self._data, stop=self._stop)
        if found:
            say(f"the cluster has {found} device(s)")
        return [head], found

    def _service(self, bound: socket.socket, redis_url: str) -> Part:
        settings = self._settings.model_copy(update={"data": self._data, "redis_url": redis_url})
        arguments = ["--fd", str(bound.fileno()), *arguments_of(settings, leave_out=EMBEDDED)]
        return Part(
            "service",
            "gradbox_service",
            arguments,
            log=self._data / "logs" / "service.log",
            pass_fds=[bound.fileno()],
        )

    def _worker(self, index: int, device: str) -> Part:
        assert self._redis is not None  # since `run` started it
        name = f"worker-{index}-{device.replace(':', '-')}"
        arguments = ["--models", str(self._models_file), "--device", device, "--name", name]
        arguments += ["--data", str(self._data), "--redis-url", self._redis.url]
        if self._settings.disk_reserve_bytes is not None:
            arguments += ["--disk-reserve-bytes", str(self._settings.disk_reserve_bytes)]
        if self._cluster is not None:
            arguments += ["--cluster", str(address_file(self._data))]
        logs = self._data / "logs"
        arguments += ["--device-log", str(logs / f"{name}.device.log")]
        arguments += [] if self._template else ["--no-template"]
        if self._build_timeout_s is not None:
            arguments += ["--build-timeout-s", str(self._build_timeout_s)]
        return Part(name, "gradbox_worker", arguments, log=logs / f"{name}.log")

    def _for_new_devices(self, workers: Sequence[Part]) -> list[Part]:
        """Return the workers, not started, that the cluster's devices want by now besides these."""
        if self._cluster is None or self._devices:
            return []
        wanted = devices_now(self._data)
        if wanted > len(workers):
            say(f"the cluster has {wanted} device(s): starting a worker for each new one")
        return [self._worker(index, CLUSTER) for index in range(len(workers), wanted)]

    def _until_ready(self, url: str, parts: Sequence[Part]) -> bool:
        """Wait until jobs can run; False if told to stop before."""
        not_ready = NotReady()
        while not self._stop.wait(LOOK_S):
            for part in parts:
                code = part.exit_code()
                if code is not None:
                    raise PartFailed.of(part, f"{ended(code)} before the box was ready", code=code)
            why = why_not_ready(url)
            if why is None:
                return True
            not_ready.because(why)
        return False

    def _say_ready(self, url: str, redis_url: str) -> None:
        # Before `READY`, with which `--wait` ends.
        for line in left_out(redis_url):
            say(line)
        # The script has stdout for itself.
        out = sys.stdout if self._script is None else sys.stderr
        print(f"{READY} {url}\n", end="", file=out, flush=True)
        host, public = self._settings.host, self._public_url
        say(how_to_reach(url, host=host, public_url=public, data=self._data))

    def _goes_on(self, drain: Drain) -> bool:
        """Wait a moment; False once the box is to end."""
        if self._stop.wait(LOOK_S):
            return False
        if self._script is not None and self._script.exit_code() is not None:
            return False
        if drain.is_over():
            say("drained: nothing runs any more")
            return False
        return True

    def _keep_running(self, parts: Sequence[Part], watchdog: Watchdog) -> None:
        for part in parts:
            if watchdog.heard_s(part.name) > part.started_s:
                part.settle()
            if part.running and watchdog.hangs(part.name, started_s=part.started_s):
                say(f"{part.name} does not answer any more: killing it")
                part.signal(signal.SIGKILL)
            said = part.keep_running()
            if said:
                say(said)

    def _start_redis(self) -> EmbeddedRedis:
        return EmbeddedRedis.start(
            self._data / "redis",
            appendfsync=self._settings.fsync,
            memory_bytes=self._settings.redis_memory_bytes,
            stopped=self._stop.is_set,
        )

    def _keep_redis(self, watchdog: Watchdog) -> None:
        assert self._redis is not None  # since `run` started it
        if self._redis.alive() and watchdog.hangs(REDIS, started_s=self._redis.started_s):
            say("Redis does not answer any more: killing it")
            self._redis.kill()
            self._redis.stop()
        if self._redis.alive() or time.monotonic() < self._redis_pause_until_s:
            return
        say("Redis ended; starting it again on the same data")
        self._redis.stop()
        try:
            self._redis = self._start_redis()
        except NoRedis as error:  # for one because the disk is full: that passes
            say(f"{error}; trying again in {REDIS_PAUSE_S:.0f} s")
            self._redis_pause_until_s = time.monotonic() + REDIS_PAUSE_S

    def _stop_redis(self) -> None:
        if self._redis is not None:
            self._redis.stop()

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

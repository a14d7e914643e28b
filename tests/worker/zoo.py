"""Models that test workers register as `file:function`: a plain one, and some that misbehave."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """y = W x + b, 3 → 2, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


def affine(dropout: float = 0.0) -> nn.Module:
    return Affine(dropout)


class Clipped(Affine):
    """Writes to its own weight in train mode."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.linear.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def clipped() -> nn.Module:
    return Clipped()


class Tied(nn.Module):
    """Two names for one weight, and a buffer that is not saved."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


def tied(scale: float = 2.0) -> nn.Module:
    return Tied(scale)


class Large(Affine):
    """Has weights that it does not use, and takes memory while it runs."""

    def __init__(self, weights_mib: int, scratch_mib: int) -> None:
        super().__init__()
        with torch.no_grad():
            self.linear.weight.fill_(0.5)
            self.linear.bias.fill_(0.25)
        self.unused = nn.Parameter(torch.zeros(weights_mib, 2**18))
        self.scratch_mib = scratch_mib

    def forward(self, x: Tensor) -> Tensor:
        scratch = torch.ones(self.scratch_mib, 2**18, device=x.device)
        return super().forward(x) * scratch[-1, -1]


def large(weights_mib: int, scratch_mib: int) -> nn.Module:
    return Large(weights_mib, scratch_mib)


class Heads(nn.Module):
    """What shapes the forward stands in an attribute only."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(4, 4)


def heads(heads: int) -> nn.Module:
    return Heads(heads)


def not_a_module() -> object:
    return object()


def raises() -> nn.Module:
    raise KeyError("no such checkpoint")


def crashes() -> nn.Module:
    ctypes.string_at(0)
    return Affine()


def is_killed() -> nn.Module:
    """Be killed from outside, as far as can be told, each time it is built."""
    os.kill(os.getpid(), signal.SIGKILL)
    return Affine()


def hangs() -> nn.Module:
    while True:
        time.sleep(60)


_draws = iter(range(1000))


def different_each_time() -> nn.Module:
    model = Affine()
    with torch.no_grad():
        model.linear.bias.fill_(next(_draws))
    return model


class Misbehaving(Affine):
    """Does what the file `order` beside this module's data says, each time it is called.

    The orders are the names of its methods; with none it behaves.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        order = Path(self.folder, "order")
        if order.exists():
            getattr(self, "_" + order.read_text().strip())()
        return super().forward(x)

    def _crash(self) -> None:
        ctypes.string_at(0)

    def _allocate(self) -> None:
        torch.empty(2**50)

    def _allocate_on_device(self) -> None:
        torch.empty(2**50, device=self.linear.weight.device)

    def _exit(self) -> None:
        sys.exit("a model has no business here")

    def _interrupt(self) -> None:
        raise KeyboardInterrupt

    def _raise_what_is_no_exception(self) -> None:
        raise GeneratorExit

    def _die_leaving_a_child(self) -> None:
        self._leave_children()
        os.kill(os.getpid(), signal.SIGKILL)

    def _leave_children(self) -> None:
        """Start what a model may start, each writing its process id: see `leave_children`."""
        leave_children(Path(self.folder))

    def _leave_children_and_sleep(self) -> None:
        if not Path(self.folder, "children").exists():
            leave_children(Path(self.folder))
        time.sleep(0.05)

    def _sleep_at_first(self) -> None:
        while Path(self.folder, "order").exists():
            time.sleep(0.02)

    def _sleep(self) -> None:
        time.sleep(0.05)

    def _hold_at_a_call(self) -> None:
        """Count calls in the file `calls`, a byte each, and wait in the one that `hold` names."""
        with Path(self.folder, "calls").open("ab") as calls:
            calls.write(b".")
            number = calls.tell()
        hold = Path(self.folder, "hold")
        while hold.exists() and hold.read_text() == str(number):
            time.sleep(0.02)

    def _leave_files_open(self) -> None:
        """Leave room for fewer than half of them, and for what this job itself opens."""
        num_allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(num_allowed, 256), most))
        while len(os.listdir("/dev/fd")) < 160:
            os.open(os.devnull, os.O_RDONLY)

    def _lower_the_limit_of_open_files(self) -> None:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    def _dawdle(self) -> None:
        time.sleep(0.3)

    def _swallow(self) -> None:
        """Resist whatever can be resisted: exceptions, and every signal but SIGKILL."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            try:
                time.sleep(0.05)
            except BaseException:  # noqa: BLE001  # what a model can do and a limit must end
                continue


def leave_children(folder: Path) -> None:
    """Leave a fork, a program of its own, and a fork that has left session and parent behind.

    Their process ids are in the file `children` of the folder, once all run.
    """
    beside = folder / "children.part"
    beside.write_text("")

    def note(pid: int) -> None:
        with beside.open("a") as file:
            file.write(f"{pid}\n")

    def sleep() -> None:
        time.sleep(60)
        os._exit(0)

    forked = os.fork()
    if forked == 0:
        sleep()
    note(forked)
    note(subprocess.Popen(["sleep", "60"]).pid)
    between = os.fork()
    if between == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            sleep()
        note(daemon)
        os._exit(0)
    os.waitpid(between, 0)
    beside.rename(folder / "children")


def misbehaving(folder: str) -> nn.Module:
    return Misbehaving(folder)

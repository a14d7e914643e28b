"""Runs that are trained while processes of their box are killed: the same bits, each step once.

    python -m proofs.chaos.training --runs 20 --steps 100 --seed 7

A run is made that nothing disturbs. Then users, two at a time, make the same run again and again,
each from its first step to its last, while devices, workers, the service and Redis are killed at
random, now and then all of the box, and connections cut. Their loop is what docs/training.md has: a
call whose step failed is repeated. What must hold of every run:

    returned       steps 1 … N in this order, with the losses and norms of the undisturbed run
    history        the same steps, each once
    weights        bit for bit those of the undisturbed run, with buffers and what the loss trains

The model has dropout and batch norm, the loss a temperature of its own, and every seventh step goes
through `run.model()` and `run.apply()`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradbox import GradClient, Optimizer, TrainRun, TrainStep, WorkerLost
from proofs.chaos import faults, invariants
from proofs.chaos.faults import Scene, acted_out, drawn
from proofs.chaos.invariants import Findings
from proofs.chaos.ledger import Witness
from proofs.chaos.sessions import PATIENCE

AT_ONCE = 2
NUM_WORKERS = 2
EVERY_APPLIED = 7
EVERY_BOX = 25  # so many faults are of one process, then one is of all
PROGRESS_WITHIN_S = 30.0
PAUSE_S = (0.0, 1.0)

Seen = list[tuple[int, float | None, float]]
"""Number, loss and gradient norm of each step."""


@dataclass
class Trained:
    """What a user has of a run at its end."""

    returned: Seen
    history: Seen
    weights: dict[str, Tensor]
    num_failed: int  # calls that were made again because all attempts of their job were lost


@dataclass
class Progress:
    """How many steps were made by all users, and how many runs are not begun."""

    runs_left: int
    num_steps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> bool:
        """Return whether there is a further run to make."""
        with self.lock:
            self.runs_left -= 1
            return self.runs_left >= 0

    def step(self) -> None:
        with self.lock:
            self.num_steps += 1


def loss(z: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    """Return a mean square, scaled by a number that is trained too."""
    return ((log_scale.exp() * z - targets) ** 2).mean()


def train(client: GradClient, num_steps: int, progress: Progress) -> Trained:
    """Make a run, as a script that repeats a call whose step failed."""
    run = client.train("unhurried", optimizer=Optimizer("adamw", lr=0.01), seed=3)
    returned, num_failed = Seen(), 0
    while len(returned) < num_steps:
        try:
            step = _step(run, run.num_steps + 1)
        except WorkerLost:
            num_failed += 1
            continue
        returned.append((step.number, step.manifest.loss, step.grad_norm))
        progress.step()
    history = [(step.number, step.loss, step.grad_norm) for step in run.history()]
    return Trained(returned, history, run.weights(), num_failed)


def _step(run: TrainRun, number: int) -> TrainStep:
    generator = torch.Generator().manual_seed(number)
    shards = list(torch.randn(8, 5, generator=generator, dtype=torch.float64).split(4))
    targets = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    options: dict[str, Any] = {"lr": 0.01 * 0.99**number, "clip_norm": 1.0, "progress": False}
    if number % EVERY_APPLIED == 0:
        model = run.model()
        z = torch.cat([model(shard) for shard in shards])
        torch.autograd.backward((z - targets).abs().mean())
        return run.apply(**options)
    scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss_inputs = {"targets": targets, "log_scale": scale}
    return run.step(inputs=shards, loss=loss, loss_inputs=loss_inputs, **options)


def differences(found: Trained, expected: Trained) -> list[str]:
    """Return how a run differs from the undisturbed one, a sentence each."""
    said = [
        f"{what} of {len(here)} steps, which differ first at {_first_difference(here, there)}"
        for what, here, there in (
            ("it returned losses and norms", found.returned, expected.returned),
            ("its history is", found.history, expected.history),
        )
        if here != there
    ]
    for name in sorted(found.weights.keys() | expected.weights.keys()):
        here_, there_ = found.weights.get(name), expected.weights.get(name)
        if here_ is None or there_ is None or not torch.equal(here_, there_):
            said.append(f"{name} is {here_}, undisturbed {there_}")
    return said


def _first_difference(here: Seen, there: Seen) -> str:
    pairs = [*zip(here, there, strict=False)]
    return next((f"{a}, undisturbed {b}" for a, b in pairs if a != b), "their number")


class User(threading.Thread):
    """Makes runs one after the other and compares each with the undisturbed one."""

    def __init__(
        self, owner: str, scene: Scene, num_steps: int, expected: Trained, progress: Progress
    ) -> None:
        super().__init__(name=owner, daemon=True)
        self._scene, self._progress = scene, progress
        self._num_steps, self._expected = num_steps, expected
        self._client = client_of(scene, owner)
        self.made: list[tuple[Trained, list[str]]] = []

    def run(self) -> None:
        while self._progress.take():
            begin = time.monotonic()
            found = train(self._client, self._num_steps, self._progress)
            said = differences(found, self._expected)
            self.made.append((found, said))
            note = "DIFFERS" if said else "equal"
            self._scene.recoveries.log.note(
                f"{self.name}: a run of {self._num_steps} steps in {time.monotonic() - begin:.0f} "
                f"s, {found.num_failed} calls repeated: {note}"
            )


def client_of(scene: Scene, owner: str) -> GradClient:
    """Return a client that reaches the box through the proxy."""
    token = scene.box.tokens[owner]
    transport = Witness(scene.ledger)
    return GradClient(scene.proxy.url, token, transport=transport, retry=PATIENCE)


def disturb(scene: Scene, users: Sequence[User], progress: Progress) -> Counter[str]:
    """Inject faults until all users are done, each as soon as a step was made since the last."""
    injected: Counter[str] = Counter()
    kinds = (*faults.KILLS, faults.CUT)
    while any(user.is_alive() for user in users):
        if injected.total() % EVERY_BOX == EVERY_BOX - 1:
            fault = drawn(scene.rng, faults.WHOLE_BOX)
            hit = fault.alone(scene)
        else:
            fault = drawn(scene.rng, kinds)
            assert fault.among is not None
            hit = fault.among(scene)
        injected[fault.name] += hit is not None
        scene.recoveries.log.note(f"{fault.name}: {hit}")
        before, give_up = progress.num_steps, time.monotonic() + PROGRESS_WITHIN_S
        while progress.num_steps == before and time.monotonic() < give_up:
            if not any(user.is_alive() for user in users):
                break
            time.sleep(0.05)
        time.sleep(scene.rng.uniform(*PAUSE_S))
    return injected


def main() -> int:
    """Make the runs, print the verdict, and return 0 if all of it held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m proofs.chaos.training", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many (20)")
    parser.add_argument("--steps", type=int, default=100, help="of each (100)")
    parser.add_argument("--seed", type=int, help="of the faults (random, and printed)")
    parser.add_argument("--verbose", action="store_true", help="print every fault")
    args = parser.parse_args()
    seed = random.randrange(10**6) if args.seed is None else args.seed
    print(f"chaos in training: --runs {args.runs} --steps {args.steps} --seed {seed}", flush=True)
    owners = [f"user-{index}" for index in range(AT_ONCE)]
    findings = Findings()
    with (
        tempfile.TemporaryDirectory(prefix="gradbox-chaos-") as folder,
        acted_out(
            Path(folder), owners=owners, num_workers=NUM_WORKERS, seed=seed, verbose=args.verbose
        ) as scene,
    ):
        expected = train(client_of(scene, owners[0]), args.steps, Progress(0))
        progress = Progress(args.runs)
        users = [User(owner, scene, args.steps, expected, progress) for owner in owners]
        for user in users:
            user.start()
        injected = disturb(scene, users, progress)
        invariants.states_when_settled(scene.box, findings)
        invariants.judge_processes(scene.box, findings)
        invariants.left_running(scene.box, findings)
    findings.server_errors += scene.ledger.server_errors
    made = [one for user in users for one in user.made]
    findings.wrong += [sentence for _, said in made for sentence in said]
    if len(made) < args.runs:
        findings.lost.append(f"{len(made)} of {args.runs} runs came to an end")
    equal = sum(not said for _, said in made)
    repeated = sum(one.num_failed for one, _ in made)
    print(*(f"{name:36}{count:6}" for name, count in sorted(injected.items())), sep="\n")
    print(
        f"{injected.total()} faults; {equal} of {args.runs} runs of {args.steps} steps equal the "
        f"undisturbed one to the last bit, each step once; {repeated} calls were repeated"
    )
    missed = [
        f"{name.replace('_', ' ')}: {sentence}"
        for name, sentences in asdict(findings).items()
        for sentence in sentences
    ]
    print(*(f"MISSED {sentence}" for sentence in missed), "" if missed else "PASS", sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

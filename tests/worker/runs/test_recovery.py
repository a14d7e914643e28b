"""A state that is lost is made again, to the last bit; a step that fails changes nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from gradbox.errors import GradientNotFinite, JobFailed
from gradbox.protocol import (
    CotangentsLoss,
    ForwardSpec,
    GradientSpec,
    OptimizerSpec,
    StateRef,
    StepView,
    TensorRef,
    step_seed,
)
from gradbox_service.database.conditional_commands import Beside
from gradbox_service.database.connection import connect
from gradbox_service.jobs import Records
from gradbox_service.runs import RunRecord, Runs
from gradbox_worker.cluster.turn import NamedDevices
from gradbox_worker.computations import cotangents
from gradbox_worker.computations.checkpoints import Pace
from gradbox_worker.computations.execution import StopNow
from gradbox_worker.device.settings import DeviceSettings
from gradbox_worker.device.warm_device import WarmDevice
from gradbox_worker.exceptions_to_problems import Caught
from gradbox_worker.runs import RecordedRuns, resident
from gradbox_worker.runs.state_file import StateFiles
from gradbox_worker.work import Failed, Finished, Stopped, Work
from tests.boxes import tensors_in
from tests.service.boxes import a_record
from tests.valkey import server
from tests.worker.box import receipt_at, sum_of_squares, traced
from tests.worker.runs.device import Device, never_again, same, shards_at
from tests.worker.runs.test_steps import traced_module

STEPS = 6


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path)


SCALE = torch.tensor(0.5, dtype=torch.float64)


class NormedLoss(nn.Module):
    """Normalises Z by its running statistics, which each call updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, z: Tensor, log_scale: Tensor) -> Tensor:
        self.norm(z)
        mean = self.norm.running_mean
        assert mean is not None
        return (z - mean).square().mean() * log_scale.exp()


class StopsAt:
    def __init__(self, phase: str, *, after: int = 0) -> None:
        self._phase, self._after = phase, after

    def step(self, phase: str, done: int, total: int) -> None:
        if phase == self._phase and done == 1:
            self._after -= 1
            if self._after < 0:
                raise StopNow


def undisturbed(folder: Path, steps: int = STEPS, **given: Any) -> list[dict[str, Tensor]]:
    """Return a run's states, the first one's too."""
    device = Device(folder)
    run = device.begin(seed=3, **given)
    states = [device.state(run)]
    for step in range(1, steps + 1):
        device.step(run, shards_at(step))
        states.append(device.state(run))
    return states


@pytest.mark.parametrize("lost_before", range(1, STEPS + 1))
def test_a_state_that_was_lost_is_made_again(tmp_path: Path, lost_before: int) -> None:
    states = undisturbed(tmp_path / "undisturbed")
    device = Device(tmp_path / "lost")
    run = device.begin(seed=3)
    for step in range(1, STEPS + 1):
        if step == lost_before:
            device.restart()
        if step == 3:
            device.clock.now += resident.WRITE_S
            device.states.rest()
        device.step(run, shards_at(step))
        assert same(device.state(run), states[step])


def test_two_files_are_kept_and_the_older_one_serves_if_the_newer_is_damaged(
    tmp_path: Path,
) -> None:
    states = undisturbed(tmp_path / "undisturbed")
    device = Device(tmp_path)
    run = device.begin(seed=3)
    for step in range(1, STEPS + 1):
        device.step(run, shards_at(step))
        if step < STEPS:
            device.clock.now += resident.WRITE_S
            device.states.rest()
    assert StateFiles(tmp_path / "runs").steps(run) == [5, 4]
    assert device.book.written[-1] == (run, [5, 4])
    assert [one.number for one in device.book.kept[run]] == [5, 6]
    newest = tmp_path / "runs" / run / "5.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5000] ^= 1
    newest.write_bytes(content)
    device.restart()
    device.step(run, shards_at(7))
    held = device.state(run)
    assert same(held, undisturbed(tmp_path / "longer", 7)[7])
    assert not same(held, states[6])


def test_a_run_without_any_whole_file_and_without_its_first_steps_says_so(device: Device) -> None:
    run = device.begin()
    for step in range(1, 4):
        device.step(run, shards_at(step))
    device.states.close()
    for path in (device.folder / "runs" / run).iterdir():
        os.truncate(path, 100)
    del device.book.kept[run][0]
    _, answer = device.run(device.spec(run, shards_at(4)))
    assert isinstance(answer, Caught)
    assert "expected a step of run run0 whose state is kept, got 3" in answer.problem.detail


def test_a_step_that_cannot_be_made_again_is_named(device: Device) -> None:
    run = device.begin()
    device.step(run, shards_at(1))
    for blob in {shard.blob for shard in device.book.kept[run][0].spec.inputs[0].shards}:
        device.box.backing.blobs.path(blob).unlink()
    device.restart()
    _, answer = device.run(device.spec(run, shards_at(2)))
    assert isinstance(answer, Caught)
    assert isinstance(answer.problem.error(), JobFailed)
    assert "step 1 of run run0 was made before and has to be made again" in answer.problem.detail


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (100.0, "does not fit into the device's memory"),
        (200.0, "the model raised ValueError"),
        (300.0, "expected a finite number, got nan"),
    ],
)
def test_a_step_that_fails_changes_nothing(device: Device, order: float, message: str) -> None:
    run = device.begin("failing")
    device.step(run, shards_at(1))
    before = device.state(run)
    bad = shards_at(2)
    bad[1]["0"][0, 0] = order
    _, answer = device.run(device.spec(run, bad))
    assert isinstance(answer, Caught)
    assert message in answer.problem.detail
    assert same(device.state(run), before)
    receipt, _ = device.step(run, shards_at(2))
    assert receipt.step == 2


@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_step_that_is_stopped_changes_nothing(device: Device, phase: str) -> None:
    run = device.begin()
    device.step(run, shards_at(1))
    before = device.state(run)
    _, answer = device.run(device.spec(run, shards_at(2)), observer=StopsAt(phase))
    assert isinstance(answer, Stopped)
    assert same(device.state(run), before)


def test_a_gradient_that_is_not_finite_changes_nothing(device: Device) -> None:
    def rooted(z: Tensor) -> Tensor:
        return (z - z.detach()).sum().square().sqrt()  # its derivative at 0 is NaN

    def scaled(z: Tensor, scale: Tensor) -> Tensor:
        return rooted(z) * scale

    run = device.begin()
    device.step(run, shards_at(1))
    before = device.state(run)
    blob = device.box.upload({"s": torch.tensor(1.0, dtype=torch.float64)})
    inputs = {"scale": TensorRef(blob=blob, tensor="s", requires_grad=True)}
    graph = traced_with(scaled, "scale")
    for given in ({"loss": rooted}, {"loss": graph, "loss_inputs": inputs}):
        _, answer = device.run(device.spec(run, shards_at(2), **given))
        assert isinstance(answer, Caught)
        assert "expected a finite gradient" in answer.problem.detail
        assert isinstance(answer.problem.error(), GradientNotFinite)
        assert "the run is unchanged, at step 1" in answer.problem.detail
        # What the loss was to bring is in the state by then, so it is made again.
        assert device.states.names == ([run] if given["loss"] is rooted else [])
        assert same(device.state(run), before)


@pytest.mark.parametrize("phase", ["forward", "replay"])
def test_a_step_goes_on_from_its_checkpoint_where_the_loss_has_buffers(
    tmp_path: Path, phase: str
) -> None:
    def begun(name: str) -> tuple[Device, str, dict[str, Any]]:
        device = Device(tmp_path / name)
        scale = {"log_scale": TensorRef(blob=device.box.upload({"s": SCALE}), tensor="s")}
        given = {"loss": traced_module(device, NormedLoss()), "loss_inputs": scale, "retain": 0}
        run = device.begin(seed=3)
        device.step(run, shards_at(1), **given)
        return device, run, given

    device, run, given = begun("stopped")
    spec = device.spec(run, shards_at(2), **given)
    work, answer = device.run(spec, observer=StopsAt(phase), pace=Pace.after(0))
    assert isinstance(answer, Stopped)
    device.restart()
    _, answer = device.run(spec, again=replace(work, attempt=2), pace=Pace.after(0))
    assert isinstance(answer, Finished), answer
    assert receipt_at(work.result_path).resumed == 1
    plain, other, given = begun("undisturbed")
    plain.step(other, shards_at(2), **given)
    expected = plain.state(other)
    assert expected["buffers/loss/norm.num_batches_tracked"] == 2
    assert same(device.state(run), expected)


def test_a_result_that_cannot_be_written_leaves_the_step_free(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = device.begin()
    device.step(run, shards_at(1))
    before = device.state(run)
    with monkeypatch.context() as patch:

        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("gradbox_worker.computations.execution.commit", full)
        _, answer = device.run(device.spec(run, shards_at(2)))
        assert isinstance(answer, Caught)
    assert device.states.names == []
    assert same(device.state(run), before)


def test_a_step_that_was_not_recorded_is_not_gone_on_from(tmp_path: Path) -> None:
    device = Device(tmp_path)
    run = device.begin(seed=3)
    device.step(run, shards_at(1))
    book = device.book
    before = dict(book.runs), {run: list(book.kept[run])}
    device.step(run, shards_at(99))  # another step 2, whose end the record does not take
    book.runs, book.kept = before
    device.states.rest()
    device.step(run, shards_at(2))
    assert same(device.state(run), undisturbed(tmp_path / "undisturbed", 2)[2])


def test_a_step_made_by_another_device_is_gone_on_from(tmp_path: Path) -> None:
    states = undisturbed(tmp_path / "undisturbed", 4)
    one = Device(tmp_path)
    run = one.begin(seed=3)
    two = Device(tmp_path, book=one.book, box=one.box)
    two.num_jobs = 1000
    for step, device in enumerate([one, two, two, one], start=1):
        device.step(run, shards_at(step))
        assert same(device.state(run), states[step])


def test_a_stop_while_a_state_is_made_again_loses_nothing(tmp_path: Path) -> None:
    device = Device(tmp_path)
    run = device.begin(seed=3)
    for step in range(1, 4):
        device.step(run, shards_at(step))
    device.restart()
    spec = device.spec(run, shards_at(4))
    _, answer = device.run(spec, observer=StopsAt("forward", after=1))
    assert isinstance(answer, Stopped)
    device.step(run, shards_at(4))
    assert same(device.state(run), undisturbed(tmp_path / "undisturbed", 4)[4])


def test_steps_come_in_their_order(device: Device) -> None:
    run = device.begin()
    device.step(run, shards_at(1))
    for number in (1, 3):
        _, answer = device.run(device.spec(run, shards_at(1), number=number))
        assert isinstance(answer, Caught)
        assert f"expected step 2 of run {run}, which is the next" in answer.problem.detail or (
            "whose state is kept" in answer.problem.detail
        )


def test_a_buffer_that_changes_its_shape_is_refused(device: Device) -> None:
    run = device.begin("growing")
    _, answer = device.run(device.spec(run, shards_at(1)))
    assert isinstance(answer, Caught)
    assert "buffer 'seen': expected the shape that it is registered with, (1,)" in (
        answer.problem.detail
    )


def traced_with(function: Any, *arguments: str) -> Any:
    from gradbox.protocol import GraphLoss, TracedFunction
    from gradbox.tracing.trace import trace

    made = trace(function, positional=1, arguments=arguments)
    return GraphLoss(function=TracedFunction(graph=made.graph))


def test_any_computation_runs_on_a_runs_weights(device: Device) -> None:
    run = device.begin()
    for step in range(1, 4):
        device.step(run, shards_at(step))
    held = device.state(run)
    shards = shards_at(9)

    def gradient(**given: Any) -> tuple[Any, dict[str, Tensor]]:
        spec = GradientSpec(
            **{
                "computation": "gradient",
                "model": "double",
                "inputs": device.spec(run, shards).inputs,
                "loss": traced(sum_of_squares),
                **given,
            }
        )
        work, answer = device.run(spec)
        assert isinstance(answer, Finished), answer
        assert answer.step is None
        return receipt_at(work.result_path), tensors_in(work.result_path)

    numbers = {n.partition("/")[2]: t for n, t in held.items() if not n.startswith("moments/")}
    blob = device.box.upload(numbers)
    weights = {name: TensorRef(blob=blob, tensor=name) for name in numbers}
    _, expected = gradient(weights=weights)
    receipt, found = gradient(state=StateRef(run=run))
    assert (receipt.state_run, receipt.state_step) == (run, 3)
    assert same(found, expected)
    _, registered = gradient()
    assert not torch.equal(registered["grads/4.weight"], found["grads/4.weight"])
    # An earlier one, while its file or the steps to it are there; the newest stays in memory.
    receipt, earlier = gradient(state=StateRef(run=run, step=1))
    assert receipt.state_step == 1
    assert not torch.equal(earlier["grads/4.weight"], found["grads/4.weight"])
    assert same(device.state(run), held)
    # And one that was saved, when the run is long gone.
    saved = device.saved(run, "good")
    assert saved == (device.folder / "runs" / run / "save-good.safetensors").stat().st_size
    device.step(run, shards_at(4))
    device.restart()
    del device.book.runs[run]
    spec = GradientSpec(
        computation="gradient",
        model="double",
        inputs=[{"shards": [{"blob": device.box.upload(shard)} for shard in shards]}],
        loss=traced(sum_of_squares),
        state=StateRef(run=run, save="good"),
    )
    work, answer = device.run(spec)
    assert isinstance(answer, Finished)
    assert same(tensors_in(work.result_path), expected)
    assert receipt_at(work.result_path).state_step == 3


def test_a_run_goes_on_from_a_save(tmp_path: Path) -> None:
    device = Device(tmp_path)
    first = device.begin(seed=3)
    for step in range(1, 4):
        device.step(first, shards_at(step))
    device.saved(first, "good")

    def going_on(**given: Any) -> str:
        run = device.begin(**{"seed": 3, "start": StateRef(run=first, step=3), **given})
        (tmp_path / "runs" / run).mkdir()
        saved = tmp_path / "runs" / first / "save-good.safetensors"
        os.link(saved, tmp_path / "runs" / run / "start.safetensors")
        return run

    run = going_on()
    for step in range(4, STEPS + 1):
        if step == 5:
            device.restart()
        device.step(run, shards_at(step))
    assert same(device.state(run), undisturbed(tmp_path / "undisturbed")[STEPS])
    # Its weights alone, by another optimizer, with less that is trained.
    sgd = OptimizerSpec(name="sgd", options={"lr": 0.0})
    run = going_on(start_moments=False, optimizer=sgd, wrt=["4.weight"])
    receipt, tensors = device.step(run, shards_at(4), returns=["grads"])
    assert receipt.step == 1
    assert list(tensors) == ["grads/4.weight"]
    held, before = device.state(run), undisturbed(tmp_path / "again", 3)[3]
    assert torch.equal(held["weights/4.weight"], before["weights/4.weight"])
    assert torch.equal(held["weights/0.weight"], before["weights/0.weight"])
    for given, message in (
        ({"optimizer": sgd}, "the moments of 'sgd', got one of 'adam'"),
        ({"wrt": ["4.weight"]}, None),
    ):
        run = going_on(**given)
        _, answer = device.run(device.spec(run, shards_at(4)))
        if message is None:
            assert isinstance(answer, Finished)
        else:
            assert isinstance(answer, Caught)
            assert message in answer.problem.detail


def test_cotangents_of_the_runs_own_model_make_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(tmp_path)
    replayed: list[str] = []  # forward jobs whose graphs were not there
    read = cotangents.first_outputs

    def noted(work: Work, job_id: str, on: torch.device) -> Any:
        replayed.append(job_id)
        return read(work, job_id, on)

    monkeypatch.setattr(cotangents, "first_outputs", noted)
    whole, halves = device.begin(seed=3), device.begin(seed=3)
    for step in range(1, 4):
        if step == 3:
            device.restart()  # so that steps are made again from cotangents
        spec = device.spec(halves, shards_at(step))
        settled = {
            name: getattr(spec, name)
            for name in ("model", "mode", "precision", "seed", "inputs", "retain")
        }
        forward = ForwardSpec(
            computation="forward",
            returns=["outputs", "buffers"],
            state=StateRef(run=halves, step=step - 1),
            **settled,
        )
        assert forward.seed == step_seed(3, step)
        work, answer = device.run(forward)
        assert isinstance(answer, Finished), answer
        z = tensors_in(work.result_path)["outputs/z"]
        blob = device.box.upload({"z": 2 * z})
        loss = CotangentsLoss(forward=work.job_id, tensors={"z": TensorRef(blob=blob, tensor="z")})
        if step == 2:
            device.kept.drop()
        replayed.clear()
        device.step(halves, shards_at(step), loss=loss, earlier=work.result_path)
        assert replayed == ([work.job_id] if step == 2 else [])
        device.step(whole, shards_at(step))
    one, other = device.state(whole), device.state(halves)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-12)
    spec = device.spec(halves, shards_at(5), loss=loss)
    _, answer = device.run(spec, earlier=work.result_path)
    assert isinstance(answer, Caught)
    assert "to have run on step 3" in answer.problem.detail


def test_the_least_recently_used_states_leave_memory(tmp_path: Path) -> None:
    size = Device(tmp_path / "one")
    run = size.begin()
    size.step(run, shards_at(1))
    num_bytes = size.states.num_bytes()
    device = Device(tmp_path / "many", budget_bytes=int(2.5 * num_bytes))
    runs = [device.begin(seed=seed) for seed in range(4)]
    for step in range(1, 4):
        for run in runs:
            device.step(run, shards_at(step))
            device.states.rest()
            assert device.states.num_bytes() <= 2.5 * num_bytes
    assert device.states.names == runs[-2:]
    plain = Device(tmp_path / "plain")
    for seed, run in enumerate(runs):
        alone = plain.begin(seed=seed)
        for step in range(1, 4):
            plain.step(alone, shards_at(step))
        assert same(device.state(run), plain.state(alone))


def test_a_run_that_rests_for_a_day_leaves_memory(device: Device) -> None:
    run = device.begin()
    device.step(run, shards_at(1))
    device.clock.now += resident.IDLE_S
    assert device.states.rest_left_s() == 0
    device.states.rest()
    assert device.states.names == []
    assert StateFiles(device.folder / "runs").steps(run) == [1]
    assert device.states.rest_left_s() is None


def test_files_are_written_now_and_then(device: Device) -> None:
    run = device.begin()
    files = StateFiles(device.folder / "runs")
    for step in range(1, resident.WRITE_STEPS):
        device.step(run, shards_at(step))
        device.states.rest()
    assert files.steps(run) == []
    assert device.states.rest_left_s() == pytest.approx(resident.WRITE_S)
    device.step(run, shards_at(20))
    device.states.rest()
    assert files.steps(run) == [20]
    device.step(run, shards_at(21))
    device.states.rest()
    assert files.steps(run) == [20]
    device.clock.now += resident.WRITE_S
    device.states.rest()
    assert files.steps(run) == [21, 20]
    assert device.book.kept[run][0].number == 21


def test_writing_takes_a_small_share_of_the_time(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = device.begin()
    written = StateFiles.write

    def slow(self: StateFiles, *given: Any) -> None:
        written(self, *given)
        device.clock.now += 2.0

    monkeypatch.setattr(StateFiles, "write", slow)
    began, spent = device.clock.now, 0
    while device.clock.now - began < 1000:
        device.clock.now += 10.0
        device.step(run, shards_at(1))
        before = len(device.book.written)
        device.states.rest()
        spent += 2 * (len(device.book.written) - before)
    assert 0.02 * 1000 <= spent <= 0.03 * 1000 + 2


def test_a_full_disk_costs_the_file_and_not_the_run(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = device.begin(seed=3)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateFiles, "write", full)
    for step in range(1, 3):
        device.step(run, shards_at(step))
        device.clock.now += resident.WRITE_S
        device.states.rest()
    device.states.close()
    device.step(run, shards_at(3))
    assert same(device.state(run), undisturbed(device.folder / "undisturbed", 3)[3])


def test_a_run_that_was_deleted_leaves_no_file(device: Device) -> None:
    run = device.begin()
    device.step(run, shards_at(1))
    del device.book.runs[run]
    device.states.close()
    assert not (device.folder / "runs" / run).exists()


def test_a_state_is_read_and_saved_by_a_job(device: Device) -> None:
    run = device.begin("matrices")
    for step in range(1, 4):
        device.step(run, shards_at(step))
    held = device.state(run)
    answer, tensors = device.written(run)
    assert answer.saved_bytes is None
    assert tensors.keys() == {n for n in held if not n.startswith("moments/")}
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    # An earlier one, too, which no file has.
    for name in ("early", "early"):  # a second attempt finds the file of the first
        answer, _ = device.written(run, save=name, step=2)
        assert answer.saved_bytes
    _, early = device.written(run, step=2)
    device.step(run, shards_at(4))
    device.restart()
    assert same(device.read_save(run, "early"), early)
    work, ended = device.run(device.forward(run, state=StateRef(run=run, save="early")))
    assert isinstance(ended, Finished)
    assert receipt_at(work.result_path).state_step == 2


class Watching:
    """Supervision that lets the job run."""

    def stop_requested(self) -> bool:
        return False

    def progress(self, phase: str, done: int, total: int) -> None: ...
    def phase_ended(self, phase: str, *, began_s: float, ended_s: float) -> None: ...


def test_a_warm_device_keeps_states_and_writes_them_when_it_closes(device: Device) -> None:
    settings = DeviceSettings(
        models_file=device.box.models_file, data=device.folder, device="cpu", job_memory_bytes=2**30
    )
    warm = WarmDevice(
        settings, book=device.book, blobs=device.box.backing.blobs, disk_reserve_bytes=0
    )
    run = device.begin()
    work = device.work(device.spec(run, shards_at(1)))
    answer = warm.run(work, Watching())
    assert isinstance(answer, Finished), answer
    assert answer.step is not None
    assert (answer.step.run, answer.step.number) == (run, 1)
    device.book.finish(work.spec, work)
    assert warm.runs is not None
    assert warm.runs.names == [run]
    left_s = warm.rest()
    assert left_s is not None
    assert 0 < left_s <= resident.WRITE_S
    warm.close()
    assert StateFiles(device.folder / "runs").steps(run) == [1]


def test_a_box_keeps_what_a_state_is_made_again_from(tmp_path: Path) -> None:
    device = Device(tmp_path)
    plain = device.begin(seed=3)
    known = device.book.runs[plain]
    backing = device.box.backing
    connection = connect(f"{server().url}?db=0")
    connection.flushdb()
    runs = Runs(connection)
    record = RunRecord(
        id=plain,
        owner="ann",
        spec=known.spec,
        model="double",
        model_version=known.model_version,
        created_s=0.0,
    )
    runs.create(record, idempotency_key=None, digest="d")
    records = Records(connection)
    recorded = RecordedRuns(runs, records, backing.results)

    def make(number: int) -> None:
        spec = device.spec(plain, shards_at(number), number=number)
        work, answer = device.run(spec, recorded=False)
        assert isinstance(answer, Finished), answer
        assert answer.step is not None
        run = runs.get(plain)
        assert run is not None
        view = StepView(
            number=number,
            job=work.job_id,
            grad_norm=answer.step.grad_norm,
            lr=answer.step.lr,
            seconds=0.0,
            finished_s=0.0,
        )
        written(runs.posting(run, job=work.job_id, digest="d"))
        written(runs.making(plain, view))
        job = a_record(work.job_id, computation="step")
        records.create(job, spec=spec)

    def written(beside: Beside) -> None:
        pipe = connection.pipeline()
        beside.write(pipe)
        pipe.execute()

    device.book = recorded  # type: ignore[assignment]
    device.restart()
    for number in range(1, STEPS + 1):
        if number in (3, 6):
            device.restart()
        make(number)
        if number in (1, 2):
            device.clock.now += resident.WRITE_S
            device.states.rest()
    after = runs.get(plain)
    assert after is not None
    assert (after.num_steps, after.kept_after, after.state_step) == (STEPS, 1, 2)
    assert [step.number for step in runs.kept(after)] == [2, 3, 4, 5, 6]
    model = device.registry.get("double")
    held = device.states.at(plain, None, model, never_again)
    assert same(held.state.tensors(), undisturbed(tmp_path / "undisturbed")[STEPS])


def test_a_job_that_runs_out_of_memory_makes_way_for_itself(device: Device) -> None:
    first, second = device.begin("failing"), device.begin("failing")
    for step in range(1, 3):
        device.step(first, shards_at(step))
    before = device.state(first)
    bad = shards_at(1)
    bad[0]["0"][0, 0] = 100.0
    _, answer = device.run(device.spec(second, bad))
    assert isinstance(answer, Caught)
    assert "does not fit" in answer.problem.detail
    assert device.states.names == [second]
    assert StateFiles(device.folder / "runs").steps(first) == [2]
    assert same(device.state(first), before)


def test_a_device_of_another_machine_than_the_boxs_trains_no_runs(device: Device) -> None:
    any_slot, devices = Mock(here=False), Mock()
    cluster = NamedDevices(
        [any_slot], devices, records=Mock(), blobs=Mock(), orders=Mock(), patience=Mock()
    )
    run = device.begin()
    for spec in (device.spec(run, shards_at(1)), device.forward(run)):
        answer = cluster.run(device.work(spec), Watching())
        assert isinstance(answer, Failed)
        assert "expected a device on the box's own machine" in answer.problem.detail
    assert not any_slot.actor.mock_calls
    cluster.close()
    devices.free.assert_called_once()

"""`GradClient.local`: a box's bits, words and receipts, without a box."""

from __future__ import annotations

import gc
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradbox import (
    Cotangents,
    Forward,
    GradboxError,
    GradClient,
    Gradient,
    GradResult,
    InvalidInputs,
    InvalidJob,
    Jacobian,
    JobState,
    JobTimedOut,
    LossNotScalar,
    ModelCallFailed,
    NeedsBox,
    Optimizer,
    PerSampleGradient,
    ServiceUnavailable,
    UnknownModel,
    UnusableModel,
)
from gradbox.computations import Computation
from tests import case_models
from tests.boxes import ROOT, TestBox
from tests.cases import CASES
from tests.client.conftest import write_models
from tests.client.remote import NaiveModel, local_outputs, loss_of, remote_outputs
from tests.client.test_mixed import REMOTE, mixed
from tests.client.test_scenarios import gradient_of
from tests.client.zoo import slow
from tests.device import DEVICE
from tests.mixed_cases import MIXED_CASES
from tests.oracle import TOLERANCE, difference, naive

SHARDS = CASES["mlp"]().groups["z"]
LABELS = torch.arange(14) % 3
# What no two runs of a job have in common, the version that a live module does not have, and what
# is compared of rows less often once earlier jobs have.
OF_ONE_RUN = {
    "job",
    "model_version",
    "seconds",
    "peak_memory_bytes",
    "memory_before_bytes",
    "rows_compared",
}


def live(*names: str) -> GradClient:
    """Return a client of live modules, which are those that the tests' boxes have."""
    return GradClient.local({name: getattr(case_models, name)().to(DEVICE) for name in names})


def tensors_of(result: GradResult) -> dict[str, Tensor]:
    return {n: result._file.tensor(n) for n in result._file.names if n != "checksums"}


def assert_same(local: GradResult, remote: GradResult) -> None:
    """Compare all bits of two results, and what their receipts say."""
    assert local.manifest.model_dump(exclude=OF_ONE_RUN) == remote.manifest.model_dump(
        exclude=OF_ONE_RUN
    )
    found, expected = tensors_of(local), tensors_of(remote)
    expected.pop("filler", None)  # between rows in 16 bits and what follows them in a file
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert local.names == remote.names


def sum_of_squares(z: Tensor) -> Tensor:
    return z.square().sum()


def each(z: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(z, labels, reduction="none")


def rows(**given: Any) -> PerSampleGradient:
    return PerSampleGradient(
        **{"model": "mlp", "inputs": SHARDS, "loss": each, "loss_inputs": {"labels": LABELS}}
        | given
    )


def jacobian(**given: Any) -> Jacobian:
    return Jacobian(**{"model": "mlp", "inputs": SHARDS} | given)


AGAINST = {"z": SHARDS[:2], "others": SHARDS[2:]}
COMPUTATIONS: dict[str, Callable[[], Computation]] = {
    "dense rows": lambda: rows(form="dense"),
    "rows as factors": lambda: rows(form="factored"),
    "norms of rows": lambda: rows(reduce="norm"),
    "gram": lambda: rows(reduce="gram"),
    "against a group": lambda: rows(
        inputs=AGAINST,
        loss_inputs={"labels": {"z": LABELS[:8], "others": LABELS[8:]}},
        reduce="gram",
        against="others",
    ),
    "projected rows": lambda: rows(reduce="projection", dim=16),
    "clipped sum": lambda: rows(reduce="clipped_sum", clip=0.5),
    "rows in 16 bits": lambda: rows(form="dense", transfer="bf16"),
    "dense Jacobian": lambda: jacobian(form="dense"),
    "factored Jacobian": lambda: jacobian(form="factored"),
    "vjp": lambda: jacobian(reduce="vjp", vectors=torch.ones(14, 3, dtype=torch.float64)),
    "gradients in 16 bits": lambda: gradient_of(CASES["mlp"](), transfer="fp16"),
    "in float64 from float32 inputs": lambda: Gradient(
        model="mlp", inputs=SHARDS, loss=sum_of_squares, precision="fp64"
    ),
    "at other weights": lambda: Gradient(
        model="mlp",
        inputs=SHARDS,
        loss=sum_of_squares,
        weights={"0.bias": torch.ones(8, dtype=torch.float64)},
        returns=("grads", "outputs", "cotangents", "input_grads"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_has_the_bits_of_a_box(twin: TestBox, name: str) -> None:
    returns = ("grads", "buffers", "outputs")
    case, expected = CASES[name](), naive(CASES[name]())
    client = live(case.model.__name__)
    result = client.run(gradient_of(case, returns=returns))
    assert result.loss == pytest.approx(expected.loss, rel=TOLERANCE)
    assert difference(result.grads, expected.grads) <= TOLERANCE
    assert_same(result, twin.result_of(gradient_of(CASES[name](), returns=returns)))


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_computation_has_the_bits_of_a_box(twin: TestBox, name: str) -> None:
    client = live("mlp")
    assert_same(client.run(COMPUTATIONS[name]()), twin.result_of(COMPUTATIONS[name]()))


def test_rows_are_those_of_autograd() -> None:
    module = case_models.mlp()
    result = GradClient.local({"mlp": module}).run(rows())
    values = each(module(torch.cat([shard["0"] for shard in SHARDS])), LABELS)
    for number, value in enumerate(values):
        grads = torch.autograd.grad(value, list(module.parameters()), retain_graph=True)
        exact = torch.cat([grad.flatten() for grad in grads])
        torch.testing.assert_close(result.flat()[number], exact, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", REMOTE)
def test_a_mixed_gradient_has_the_bits_of_a_box(twin: TestBox, tmp_path: Path, name: str) -> None:
    client = GradClient.local(write_models(tmp_path / "models.toml"), device=str(DEVICE))
    case = MIXED_CASES[name]()
    result = client.run(mixed(case, REMOTE[name], returns=("grads", "dfdz")))
    again = mixed(MIXED_CASES[name](), REMOTE[name], returns=("grads", "dfdz"))
    expected = twin.result_of(again)
    assert_same(result, expected)
    assert result.manifest.model_version == expected.manifest.model_version


def test_cotangents_of_a_forward_job_have_the_bits_of_a_box(twin: TestBox) -> None:
    def both_halves(client: GradClient) -> tuple[GradResult, GradResult]:
        z = client.run(Forward(model="inplace_mlp", inputs=SHARDS, mode="train"))
        loss = Cotangents({"z": 2 * z.outputs["z"]}, of=z.manifest.job)
        return z, client.run(Gradient(loss=loss))

    local, remote = both_halves(live("inplace_mlp")), both_halves(twin.client())
    assert_same(local[0], remote[0])
    for name, grad in remote[1].grads.items():
        assert torch.equal(local[1].grads[name], grad)


def test_rows_of_an_earlier_job_are_multiplied_with(twin: TestBox) -> None:
    def products(client: GradClient) -> Tensor:
        earlier = client.submit(rows(form="factored"))
        earlier.wait()
        return client.run(rows(reduce="gram", against=earlier.id)).gram()

    assert torch.equal(products(live("mlp")), products(twin.client()))


@pytest.mark.parametrize("name", ["mlp", "cnn in train", "two towers"])
def test_any_loss_on_a_models_calls_is_that_of_a_box(twin: TestBox, name: str) -> None:
    case = CASES[name]()
    how = {"mode": case.mode, "seed": case.seed, "output": case.output, "readout": case.readout}
    found = []
    for client in (live(case.model.__name__), twin.client()):
        f = client.model(case.model.__name__, **how)
        loss_of(case, remote_outputs(case, f)).backward()
        found.append(f)
    local, remote = found
    assert local.grads.keys() == remote.grads.keys()
    for parameter, grad in remote.grads.items():
        assert torch.equal(local.grads[parameter], grad)
    g = NaiveModel(case.model(), mode=case.mode, seed=case.seed)
    loss_of(CASES[name](), local_outputs(case, g)).backward()
    assert difference(local.grads, g.grads) <= TOLERANCE


def test_inputs_of_a_call_get_gradients_and_backward_may_be_repeated() -> None:
    module = case_models.mlp()
    f = GradClient.local({"mlp": module}).model("mlp")
    x = SHARDS[0]["0"].clone().requires_grad_()
    z = f(x)
    z.square().sum().backward(retain_graph=True)
    first = x.grad.clone()
    z.square().sum().backward()
    x.grad, twice = None, x.grad
    module(x).square().sum().backward()
    torch.testing.assert_close(first, x.grad, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(twice, 2 * first)


ERRORS: dict[str, tuple[type[GradboxError], Callable[[], Computation]]] = {
    "an unknown model": (
        UnknownModel,
        lambda: Gradient(model="mlpp", inputs=SHARDS, loss=sum_of_squares),
    ),
    "no such parameter": (
        InvalidInputs,
        lambda: Gradient(model="mlp", inputs=SHARDS, loss=sum_of_squares, wrt="0.weigth"),
    ),
    "no such argument": (
        InvalidInputs,
        lambda: Gradient(model="mlp", inputs=[{"x": torch.ones(2, 5)}], loss=sum_of_squares),
    ),
    "no such weight": (
        InvalidInputs,
        lambda: rows(weights={"0.biass": torch.ones(8, dtype=torch.float64)}),
    ),
    "a shape that the model refuses": (
        ModelCallFailed,
        lambda: Gradient(
            model="mlp", inputs=[torch.ones(2, 4, dtype=torch.float64)], loss=sum_of_squares
        ),
    ),
    "a loss with several entries": (
        LossNotScalar,
        lambda: Gradient(model="mlp", inputs=SHARDS, loss=lambda z: z * 2),
    ),
    "cotangents of no job": (
        InvalidInputs,
        lambda: Gradient(loss=Cotangents(torch.ones(2, 3), of="0" * 32)),
    ),
    "samples that see each other": (
        InvalidInputs,
        lambda: PerSampleGradient(
            model="cnn",
            inputs=[torch.ones(3, 2, 6, 6, dtype=torch.float64)],
            loss=lambda z: z.flatten(1).sum(1),
            mode="train",
        ),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_a_boxs_word_for_word(twin: TestBox, tmp_path: Path, name: str) -> None:
    kind, computation = ERRORS[name]
    client = GradClient.local(write_models(tmp_path / "models.toml"), device=str(DEVICE))
    with pytest.raises(kind) as local:
        client.run(computation())
    with pytest.raises(kind) as remote:
        twin.result_of(computation())
    assert type(local.value) is type(remote.value)
    assert str(local.value) == str(remote.value)


def test_what_a_model_raised_is_the_cause() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("in the model")

    client = GradClient.local({"broken": Broken(3, 2)})
    job = client.submit(Gradient(model="broken", inputs=[torch.ones(1, 3)], loss=sum_of_squares))
    assert job.state is JobState.FAILED
    with pytest.raises(ModelCallFailed, match="ZeroDivisionError: in the model") as raised:
        job.result()
    assert isinstance(raised.value.__cause__.__cause__, ZeroDivisionError)


def test_a_module_that_is_trained_in_between_is_used_as_it_is() -> None:
    module = case_models.mlp()
    client = GradClient.local({"mlp": module})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        result = client.run(Gradient(model="mlp", inputs=SHARDS, loss=sum_of_squares))
        exact = sum_of_squares(module(torch.cat([shard["0"] for shard in SHARDS])))
        assert result.loss == pytest.approx(exact.item(), rel=TOLERANCE)
        assert result.manifest.model_version == ""
        losses.append(result.loss)
        optimizer.zero_grad()
        result.apply_to(module)
        optimizer.step()
        if step == 2:  # a write that no version counter shows
            module[0].weight.data.mul_(0.5)
    assert len(set(losses)) == len(losses)


def test_a_module_that_changes_between_the_halves_is_noticed() -> None:
    module = case_models.mlp()
    f = GradClient.local({"mlp": module}).model("mlp")
    loss = f(SHARDS[0]).square().sum()
    module[0].weight.data.mul_(1.5)
    with pytest.raises(GradboxError, match="replay"):
        loss.backward()


def test_rows_of_a_module_whose_layers_are_exchanged_are_the_new_layers() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    client = GradClient.local({"mlp": module})
    first = client.run(rows())
    assert first.flat().shape == (14, 39)
    module[1] = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double()
    module[2].forward = lambda x: nn.functional.linear(x, module[2].weight * 2, module[2].bias)
    second = client.run(rows())
    assert "1.0.weight" in second.names
    values = each(module(torch.cat([shard["0"] for shard in SHARDS])), LABELS)
    for number in (0, 13):
        grads = torch.autograd.grad(values[number], list(module.parameters()), retain_graph=True)
        exact = torch.cat([grad.flatten() for grad in grads])
        torch.testing.assert_close(second.flat()[number], exact, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_module_is_as_it_was_after_a_job_and_after_a_failed_one() -> None:
    module = case_models.cnn().train()
    module[0].weight.requires_grad_(False)
    module[4].weight.grad = torch.ones_like(module[4].weight)
    calls: list[str] = []
    module[0].register_forward_hook(lambda *_: calls.append("called"))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    client = GradClient.local({"cnn": module})
    x = [torch.randn(3, 2, 6, 6, dtype=torch.float64) for _ in range(2)]
    client.run(Gradient(model="cnn", inputs=x, loss=sum_of_squares, mode="train"))
    assert calls
    with pytest.raises(LossNotScalar):
        client.run(Gradient(model="cnn", inputs=x, loss=lambda z: z, mode="eval"))
    assert module.training
    assert not module[0].weight.requires_grad
    assert module[1].weight.requires_grad
    assert torch.equal(module[4].weight.grad, torch.ones_like(module[4].weight))
    assert module[1].weight.grad is None
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_callers_contexts_are_not_the_jobs() -> None:
    client = live("mlp")
    computation = Gradient(model="mlp", inputs=SHARDS, loss=sum_of_squares)
    expected = client.run(computation)
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        with context:
            found = client.run(computation)
        assert found.loss == expected.loss
        assert torch.equal(found.flat(), expected.flat())


def test_writing_into_inputs_or_a_result_changes_no_later_job() -> None:
    client = live("mlp")
    inputs = [shard["0"].clone() for shard in SHARDS]
    z = client.run(Forward(model="mlp", inputs=inputs))
    inputs[0].zero_()
    cotangents = torch.ones(14, 3, dtype=torch.float64)
    z.outputs["z"].zero_()
    grads = client.run(Gradient(loss=Cotangents({"z": cotangents}, of=z.manifest.job))).grads
    module = case_models.mlp()
    module(torch.cat([shard["0"] for shard in SHARDS])).sum().backward()
    exact = {name: p.grad for name, p in module.named_parameters()}
    assert difference(grads, exact) <= TOLERANCE


def test_a_job_that_nobody_holds_is_gone() -> None:
    client = live("mlp")
    job_id = client.run(Forward(model="mlp", inputs=SHARDS)).manifest.job
    gc.collect()
    with pytest.raises(InvalidInputs, match="post the forward job first"):
        client.run(Gradient(loss=Cotangents(torch.ones(14, 3), of=job_id)))


# How much memory there is, and was needed, is read there.
KERNELS = ("/proc/", "/sys/")

REFUSED: dict[str, Callable[[GradClient], object]] = {
    "listing jobs": lambda client: client.jobs(),
    "an earlier job by its id": lambda client: client.job("0" * 32),
    "training": lambda client: client.train("mlp", optimizer=Optimizer("sgd", lr=0.1)),
    "listing runs": lambda client: client.runs(),
    "finding a run": lambda client: client.find_run("name"),
    "a saved state": lambda client: client.run(rows(weights="saved")),
    "listing blobs": lambda client: client.blobs(),
    "deleting a blob": lambda client: client.delete_blob("0" * 64),
    "reloading models": lambda client: client.reload_models(),
    "a job's events": lambda client: next(iter(client.submit(rows()).events())),
    "deleting a result": lambda client: client.submit(rows()).delete(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_a_box_is_refused_by_one_error(name: str) -> None:
    with pytest.raises(NeedsBox, match="box"):
        REFUSED[name](live("mlp"))


def test_models_are_described_and_their_methods_are_entry_points() -> None:
    class Towers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.left(x)

        def left(self, x: Tensor) -> Tensor:
            return super().forward(x)

        def _private(self, x: Tensor) -> Tensor:
            return x

    client = GradClient.local({"mlp": case_models.mlp(), "towers": Towers(5, 3).double()})
    assert [view.name for view in client.models()] == ["mlp", "towers"]
    assert sorted(client.model_info("towers").methods) == ["forward", "left"]
    computation = Gradient(model="towers", inputs=SHARDS, loss=sum_of_squares, method="left")
    assert client.run(computation).loss > 0
    with pytest.raises(UnknownModel, match="mlp, towers"):
        client.model("other")
    with pytest.raises(UnknownModel, match="no version"):
        client.run(Gradient(model="mlp@12345678", inputs=SHARDS, loss=sum_of_squares))
    with pytest.raises(InvalidInputs, match="no entry point"):
        client.run(Gradient(model="mlp", inputs=SHARDS, loss=sum_of_squares, method="left"))


@pytest.mark.parametrize(
    ("models", "match"),
    [({}, "name: module"), ({"a b": nn.Tanh()}, "names of letters"), ({"a": 3}, "nn.Module")],
)
def test_what_is_no_model_is_refused_at_once(models: Any, match: str) -> None:
    with pytest.raises(InvalidJob, match=match):
        GradClient.local(models)


def test_a_models_file_that_is_not_there_and_a_module_without_numbers() -> None:
    with pytest.raises(InvalidJob, match="no_such_file"):
        GradClient.local("no_such_file.toml")
    client = GradClient.local({"lazy": nn.LazyLinear(3)})
    assert [view.usable for view in client.models()] == [False]
    with pytest.raises(UnusableModel, match="no numbers yet"):
        client.run(Gradient(model="lazy", inputs=SHARDS, loss=sum_of_squares))


@pytest.fixture
def touched() -> Iterator[list[str]]:
    """The files and sockets that this process opens meanwhile."""
    seen: list[str] = []
    watching = True

    def hook(event: str, args: Any) -> None:
        if not watching:
            return
        if event == "open" and isinstance(args[0], str) and not args[0].startswith(KERNELS):
            seen.append(args[0])
        elif event.startswith(("socket.", "subprocess.", "os.mkdir", "os.link", "shutil.")):
            seen.append(event)

    sys.addaudithook(hook)  # which cannot be removed
    yield seen
    watching = False


def test_no_file_and_no_socket_has_a_part_in_it(touched: list[str]) -> None:
    client = live("mlp", "inplace_mlp")

    def all_kinds() -> None:
        for name in ("rows as factors", "dense rows", "dense Jacobian", "at other weights"):
            client.submit(COMPUTATIONS[name]()).result().flat()
        f = client.model("inplace_mlp", mode="train")
        torch.cat([f(shard) for shard in SHARDS]).square().sum().backward()

    all_kinds()  # which imports what it needs
    touched.clear()
    all_kinds()
    assert touched == []


def test_a_result_is_saved_and_read_again(tmp_path: Path) -> None:
    job = live("mlp").submit(rows(form="factored"))
    job.fetch(tmp_path / "job.safetensors")
    job.result().save(tmp_path / "result.safetensors")
    for name in ("job", "result"):
        read = GradResult.load(tmp_path / f"{name}.safetensors")
        assert torch.equal(read.flat(), job.open().flat())
        assert read.manifest == job.result().manifest


def test_a_job_says_how_far_it_is_and_ends_when_its_time_is_up() -> None:
    client = GradClient.local({"slow": slow()})
    shards = [torch.ones(2, 3) for _ in range(8)]
    job = client.submit(
        Gradient(model="slow", inputs=shards, loss=sum_of_squares, timeout_s=0.3), progress=True
    )
    with pytest.raises(JobTimedOut, match=r"timeout_s of 0.3 s"):
        job.result()
    assert 0 < job.view.progress.done < 8
    done = client.submit(Gradient(model="slow", inputs=shards[:2], loss=sum_of_squares))
    assert (done.state, done.view.progress.done, done.view.attempts) == (JobState.DONE, 2, 1)
    assert done.cancel().state is JobState.DONE


def test_progress_is_shown_on_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    client = GradClient.local({"slow": slow()})
    shards = [torch.ones(2, 3) for _ in range(6)]
    client.run(
        Gradient(model="slow", inputs=shards, loss=sum_of_squares, name="mine"), progress=True
    )
    assert "mine: forward" in capfd.readouterr().err


def test_threads_and_batches_take_turns() -> None:
    client = live("inplace_mlp")
    computations = [
        Gradient(model="inplace_mlp", inputs=SHARDS, loss=sum_of_squares, mode="train", seed=seed)
        for seed in range(6)
    ]
    alone = [client.run(computation).flat() for computation in computations]
    with client.batch() as batch:
        for computation in computations:
            batch.submit(computation)
    together = batch.results()
    assert all(map(torch.equal, alone, [result.flat() for result in together]))


def test_a_job_inside_a_job_is_refused() -> None:
    class Nested(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            client.run(Gradient(model="nested", inputs=SHARDS, loss=sum_of_squares))
            return super().forward(x)

    client = GradClient.local({"nested": Nested(5, 2).double()})
    with pytest.raises(InvalidJob, match="no job inside another one"):
        client.run(Gradient(model="nested", inputs=SHARDS, loss=sum_of_squares))


def test_ctrl_c_goes_through_and_leaves_the_module_as_it_was() -> None:
    class Interrupted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.requires_grad_(False)
            raise KeyboardInterrupt

    module = Interrupted(5, 2).double().train()
    client = GradClient.local({"mine": module})
    with pytest.raises(KeyboardInterrupt):
        client.run(Gradient(model="mine", inputs=SHARDS, loss=sum_of_squares))
    assert module.training
    assert module.weight.requires_grad
    assert threading.active_count() >= 1
    with pytest.raises(KeyboardInterrupt):  # the next job begins
        client.run(Gradient(model="mine", inputs=SHARDS, loss=sum_of_squares))


def test_the_example_agrees_with_vmap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    folder = Path(ROOT, "examples")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "digits", raising=False)  # a page's, of another folder
    runpy.run_path(str(folder / "local.py"), run_name="__main__")
    del sys.modules["digits"]
    assert capsys.readouterr().out.count("from vmap") == 2


def test_a_closed_client_takes_no_more() -> None:
    with live("mlp") as client:
        client.run(rows())
    with pytest.raises(ServiceUnavailable, match="closed"):
        client.run(rows())


def test_without_the_workers_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gradbox_worker.local", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gradbox\[worker\]'"):
        live("mlp")

"""What is raised below the worker becomes the error that the user is told."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch

import gradbox_engine
from gradbox import errors
from gradbox_engine.errors import EngineError, GradientNotFinite
from gradbox_worker.computations.placement import choose_device
from gradbox_worker.errors import ModelsFileError
from gradbox_worker.exceptions_to_problems import Caught, caught, translated


def raise_from(outer: Exception, cause: BaseException) -> Exception:
    outer.__cause__ = cause
    return outer


def cpu_exhaustion() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught_error:
        torch.empty(2**50)
    return caught_error.value


MODEL_FAILED = gradbox_engine.ModelCallFailed


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_told_without_a_traceback(name: str) -> None:
    found = caught(lambda: choose_device(name), doing="the start")
    assert isinstance(found, Caught)
    assert found.problem.detail.startswith("expected a device of this machine (cpu")
    assert f"got {name!r}; name one of them with --device" in found.problem.detail


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (gradbox_engine.ReplayMismatch("m"), "replay-mismatch"),
        (gradbox_engine.LossNotScalar("m"), "loss-not-scalar"),
        (gradbox_engine.LossNotFinite("m"), "loss-not-finite"),
        (GradientNotFinite("m"), "gradient-not-finite"),
        (MODEL_FAILED("m"), "model-call-failed"),
        (gradbox_engine.UnknownParameter("m"), "invalid-inputs"),
        (gradbox_engine.BadOutput("m"), "invalid-inputs"),
        (gradbox_engine.BadWeights("m"), "invalid-inputs"),
        (ModelsFileError("m"), "unknown-model"),
        (errors.BlobRejected("m"), "blob-rejected"),
        (raise_from(MODEL_FAILED("m"), errors.GraphRefused("too big")), "graph-refused"),
        (raise_from(MODEL_FAILED("m"), errors.MissingBlobs("gone")), "missing-blobs"),
        (raise_from(MODEL_FAILED("m"), MemoryError()), "out-of-memory"),
        (raise_from(MODEL_FAILED("m"), torch.OutOfMemoryError("m")), "out-of-memory"),
        (raise_from(MODEL_FAILED("m"), cpu_exhaustion()), "out-of-memory"),
        (raise_from(MODEL_FAILED("m"), RuntimeError("std::bad_alloc")), "out-of-memory"),
        (raise_from(MODEL_FAILED("m"), RuntimeError("CUDNN_STATUS_ALLOC_FAILED")), "out-of-memory"),
        (torch.AcceleratorError("CUDA error: out of memory"), "out-of-memory"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), "job-failed"),
        (RuntimeError("m"), "job-failed"),
        (SystemExit(3), "job-failed"),
        (KeyboardInterrupt(), "job-failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_error_table(raised: BaseException, code: str) -> None:
    assert translated(raised, doing="job 1").code == code


def test_every_error_of_the_engine_is_the_users_to_mend() -> None:
    for _, kind in inspect.getmembers(gradbox_engine, inspect.isclass):
        if issubclass(kind, EngineError):
            assert translated(kind("m"), doing="job 1").category == "user"


def test_the_message_survives_and_the_traceback_stays_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def call() -> None:
        raise ZeroDivisionError("a secret path /home/alice")

    with caplog.at_level(logging.ERROR):
        answer = caught(call, doing="job 7")
    assert isinstance(answer, Caught)
    assert answer.problem.detail.startswith("job 7 failed with ZeroDivisionError")
    assert "Traceback" not in answer.problem.model_dump_json()
    assert "Traceback" in caplog.text


def test_what_is_let_through_is_not_caught() -> None:
    def call() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        caught(call, doing="job 7", let_through=KeyError)


def test_a_value_passes_as_it_is() -> None:
    assert caught(lambda: 5, doing="job 7") == 5


@pytest.mark.parametrize(
    ("message", "spoilt"),
    [("CUDA error: device-side assert triggered", True), ("CUDA error: out of memory", False)],
)
def test_what_spoils_the_device_is_kept_with_all_that_its_traceback_holds(
    message: str, spoilt: bool
) -> None:
    error = torch.AcceleratorError(message)

    def call() -> None:
        raise error

    answer = caught(call, doing="job 7")
    assert isinstance(answer, Caught)
    assert answer.spoilt == spoilt
    assert answer.error is (error if spoilt else None)

"""The options of a job are the same from the constructor to the engine."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from gradbox import Forward, Gradient, Jacobian, MixedGradient, PerSampleGradient
from gradbox.protocol import (
    GradientOptions,
    JobOptions,
    JobSpec,
    ModelKeywords,
    SharedSpec,
    option_names,
)
from gradbox_engine import CallOptions
from gradbox_service.admission.admit import OWN
from gradbox_worker.computations.execution import COMPUTATIONS
from gradbox_worker.computations.job import ENGINE_OPTIONS

COMPUTATIONS_OF_USERS = (Forward, Gradient, Jacobian, MixedGradient, PerSampleGradient)
SPECS: tuple[type[SharedSpec], ...] = get_args(get_args(JobSpec)[0])


def test_client_model_takes_all_options_but_streams() -> None:
    assert set(ModelKeywords.__annotations__) == option_names(GradientOptions) - {"streams"}


@pytest.mark.parametrize("kind", [*COMPUTATIONS_OF_USERS, *SPECS])
def test_computations_and_specs_have_every_option(kind: Any) -> None:
    assert issubclass(kind, JobOptions)


def test_the_engine_is_told_what_it_knows_of_them() -> None:
    assert {"seed", "mode", "precision", "output", "streams", "recompute"} == ENGINE_OPTIONS
    assert set(vars(CallOptions())) >= ENGINE_OPTIONS


@pytest.mark.parametrize("table", [OWN, COMPUTATIONS])
def test_admission_and_worker_have_a_row_for_every_computation(table: dict[type, Any]) -> None:
    assert set(table) == set(SPECS)

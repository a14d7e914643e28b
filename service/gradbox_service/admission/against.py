"""The rows of another job that a per-sample job's rows are multiplied with."""

from __future__ import annotations

from gradbox.errors import InvalidInputs
from gradbox.protocol import JobSpec, ModelView, SampleSpec
from gradbox_service.admission.earlier_job import earlier_job, result_header
from gradbox_service.backing import Backing

KIND = "job with factored rows"


def check_against(spec: JobSpec, *, model: ModelView, owner: str, box: Backing) -> None:
    """Check that `against`, if there is one, names rows that these can be multiplied with.

    Raises:
        InvalidInputs: the owner has no such job that is done, it was of another computation or
            model, or it left no factors.
    """
    if not isinstance(spec, SampleSpec) or spec.against is None:
        return
    record, other = earlier_job(spec.against, where="against", kind=KIND, owner=owner, box=box)
    if type(other) is not type(spec):
        raise InvalidInputs(
            f"against: expected a job of the same computation, {spec.computation}, got job "
            f"{record.id}, which is a {record.computation}"
        )
    if other.reduce != "none" or other.form == "dense":
        raise InvalidInputs(
            f"against: expected a job whose rows are kept as factors, got job {record.id} with "
            f"reduce={other.reduce!r} and form={other.form!r}; run it with reduce='none' and "
            f"form='factored' or 'auto'"
        )
    if (record.model, record.model_version) != (model.name, model.version):
        raise InvalidInputs(
            f"against: expected rows of {model.name}@{model.version[:12]}, got those of job "
            f"{record.id}, which ran {record.model}@{record.model_version[:12]}; run it again"
        )
    result_header(record, where="against", kind=KIND, box=box)

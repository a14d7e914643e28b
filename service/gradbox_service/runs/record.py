"""What the box knows of a run and of a saved state beside their tensors, and how that changes.

    posted      the job of step `num_steps` + 1 is `posted_job`, until that is made
    made        `num_steps` + 1, by the write that ends its job
    written     steps up to `kept_after` need never be made again: state files cover them twice

A change is a pure function, as those of a job's record are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from gradbox.protocol import RunSpec, RunView, SaveView, StepView
from gradbox_service.database.owned import OwnedRecord


@dataclass(frozen=True, kw_only=True)
class RunRecord(OwnedRecord):
    """A run."""

    spec: RunSpec
    # The registered name, and the full version that the run is bound to.
    model: str
    model_version: str
    # Which step it began behind: 0, or that of the state that it goes on from.
    first_step: int = 0
    # How many steps were made, and by which job the last one; none at first.
    num_steps: int = 0
    last_job: str = ""
    # What the last step said of itself.
    loss: float | None = None
    grad_norm: float | None = None
    last_step_s: float | None = None
    # The job that was last posted as the next step, and the digest of its spec. It may have failed.
    posted_job: str = ""
    posted_digest: str = ""
    # Steps behind this one are made again where a state was lost. Of which step the newest state
    # file is, and what it takes together with the one before, which is there for a disk that
    # damages the newest.
    kept_after: int = 0
    state_step: int | None = None
    state_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """What its two state files take."""
        return self.state_bytes

    @property
    def used_s(self) -> float:
        """When it was last used."""
        return self.last_step_s or self.created_s

    @property
    def full_model(self) -> str:
        """The model as NAME@VERSION."""
        return f"{self.model}@{self.model_version}"

    def posted(self, *, job: str, digest: str) -> RunRecord:
        """Note the job of the next step."""
        return replace(self, posted_job=job, posted_digest=digest)

    def made(self, step: StepView) -> RunRecord | None:
        """Count a step; None if it is not the next one, or another job is to make that."""
        if step.number != self.num_steps + 1 or step.job != self.posted_job:
            return None
        return replace(
            self,
            num_steps=step.number,
            last_job=step.job,
            loss=step.loss,
            grad_norm=step.grad_norm,
            last_step_s=step.finished_s,
            posted_job="",
            posted_digest="",
        )

    def written(self, steps: Collection[int], *, size_bytes: int) -> RunRecord:
        """Note of which steps there are state files: of two, or of the first one."""
        oldest = min(steps) if len(steps) > 1 else self.kept_after
        return replace(
            self,
            kept_after=max(self.kept_after, oldest),
            state_step=max(steps, default=None),
            state_bytes=size_bytes,
        )

    def view(self, *, saves: Sequence[SaveView] = (), under_way: str | None = None) -> RunView:
        """Return what the wire says of it."""
        spec = self.spec
        return RunView(
            **{name: getattr(spec, name) for name in ("name", "wrt", "mode", "precision", "seed")},
            **{name: getattr(self, name) for name in _SHOWN},
            optimizer=spec.optimizer.model_dump(mode="json", exclude_defaults=True),
            adapter=None if spec.adapter is None else spec.adapter.model_dump(mode="json"),
            under_way=under_way,
            saves=list(saves),
        )


@dataclass(frozen=True, kw_only=True)
class SaveRecord(OwnedRecord):
    """A state that is saved under a name, or is about to be; its owner is that of the run."""

    name: str
    run: str
    step: int
    # The job that writes it.
    job: str
    # Whether everybody may read it.
    shared: bool = False
    # What its file takes; None until it is written.
    size_bytes: int | None = None

    @classmethod
    def of(
        cls, run: RunRecord, name: str, *, step: int, job: str, shared: bool, now_s: float
    ) -> SaveRecord:
        """Return that of a state which a job is about to save."""
        return cls(
            id=save_id(run.owner, name),
            owner=run.owner,
            created_s=now_s,
            name=name,
            run=run.id,
            step=step,
            job=job,
            shared=shared,
        )

    @property
    def kept_bytes(self) -> int:
        """What its file takes."""
        return self.size_bytes or 0

    def view(self) -> SaveView:
        """Return what the wire says of it, once it is written."""
        return SaveView.model_validate(self, from_attributes=True)


def save_id(owner: str, name: str) -> str:
    """Return the id of an owner's save of a name."""
    return f"{owner}:{name}"


# What the wire calls as the record does.
_SHOWN = RunView.model_fields.keys() & {item.name for item in fields(RunRecord)}

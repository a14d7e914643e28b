"""The receipt: what a result says of its own making (safetensors metadata key `gradbox`)."""

from __future__ import annotations

from gradbox import html
from gradbox.protocol.views import View


class Seconds(View):
    """Where the time of a job went."""

    queued: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    cotangents: float = 0.0
    replay: float = 0.0
    samples: float = 0.0


class RangeView(View):
    """Consecutive shards, from `start` up to but not including `stop`, that one device ran.

    Per-sample quantities take `samples_s`, everything else `forward_s` and `replay_s`.
    `shards_retained` counts those whose graphs were kept, for the replay or for a later job.
    `devices_lost` counts devices that ended while they ran them; `rerun_difference` is then the
    largest |z' − z| between two devices, relative to a shard's largest |z|.
    """

    start: int
    stop: int
    device: str
    forward_s: float = 0.0
    replay_s: float = 0.0
    samples_s: float = 0.0
    shards_retained: int = 0
    devices_lost: int = 0
    rerun_difference: float = 0.0


class Receipt(View):
    """What a result says of its own making.

    What is None does not exist for this computation: outputs have no loss. `names` are the
    gradients in `named_parameters` order, then those of the loss: a safetensors file keeps no order
    of its own. `unreached` names parameters that the loss does not depend on; their gradients are
    zeros. `rows` are, by group, the rows of each shard in Z before `order`; null for a z without
    dimensions. `stateful` says whether a forward pass changed the model's buffers;
    `changed_attributes` names attributes that it changed, themselves or inside, ten at most, with
    which no later job begins.
    `replay_difference` is the largest |z' − z| over a shard, relative to that shard's
    largest |z|. Of per-sample jobs, `samples` and `outputs` count B and Y, `roads` are the rules
    that each parameter took, and `loops` why some took one backward pass a sample; `against` is the
    job, or `against_group` the group, whose rows theirs were multiplied with, and
    `projection_error` bounds the standard deviation of ⟨Sx, Sy⟩ / (‖x‖‖y‖) over the seeds of a
    projection S. `fallbacks` counts, by the operation that was in the way, the shards of a mixed
    gradient whose tangent was not taken by forward mode. `resumed` counts the attempts that went on
    from a checkpoint.
    Of a job with `transfer`, `transfer_error` bounds ‖rounded − g‖ / ‖g‖ of every gradient g, or of
    a sample's row of a parameter: 2⁻⁸ in bf16, 2⁻¹¹ in fp16, and more where numbers are below what
    fp16 holds in full; `transfer_kept` names gradients that the format does not
    hold, which came as they were; `weights_widened` counts `weights` that came in the format.
    Of a job that ran on several devices, `ranges` are the shards that each ran, and `bytes_moved`
    what crossed between them and their coordinator, by kind; `not_split` says why a job that asked
    for several ran on one.
    `peak_memory_bytes` is the process's peak on a CPU (model included), the allocator's on CUDA.
    """

    protocol: int
    job: str
    spec_digest: str
    computation: str
    model: str
    model_version: str
    seed: int
    mode: str
    precision: str
    device: str
    torch: str
    gradbox: str
    loss: float | None = None
    shards: dict[str, int]
    rows: dict[str, list[int | None]] | None = None
    stateful: bool | None = None
    changed_attributes: list[str] = []
    shards_retained: int | None = None
    shards_replayed: int | None = None
    replay_difference: float | None = None
    fallbacks: dict[str, int] | None = None
    names: tuple[str, ...] = ()
    unreached: list[str] = []
    samples: int | None = None
    outputs: int | None = None
    reduce: str | None = None
    form: str | None = None
    against: str | None = None
    against_group: str | None = None
    projection_kind: str | None = None
    projection_error: float | None = None
    transfer: str | None = None
    transfer_error: float | None = None
    transfer_kept: list[str] = []
    weights_widened: int | None = None
    roads: dict[str, list[str]] | None = None
    loops: dict[str, str] | None = None
    ranges: list[RangeView] | None = None
    bytes_moved: dict[str, int] | None = None
    not_split: str | None = None
    seconds: Seconds
    peak_memory_bytes: int
    memory_before_bytes: int
    attempts: int = 1
    resumed: int = 0

    def _repr_html_(self) -> str:
        return html.card(f"Receipt of job {self.job}", self.facts())

    def facts(self) -> list[tuple[str, object]]:
        """Return what a person wants to know of it, as names and values."""
        seconds = self.seconds.model_dump()
        return [
            ("computation", self.computation),
            ("model", f"{self.model}@{self.model_version[:12]}"),
            ("loss", None if self.loss is None else f"{self.loss:.6g}"),
            ("shards", ", ".join(f"{num} {group}" for group, num in self.shards.items())),
            ("graphs kept", self.shards_retained),
            ("replayed", self.shards_replayed),
            ("replay difference", _rounded(self.replay_difference)),
            ("samples", self.samples),
            ("outputs", self.outputs),
            ("reduce", self.reduce),
            ("form", self.form),
            ("against the rows of", self.against or self.against_group),
            ("projection", self.projection_kind),
            ("error of its inner products", _rounded(self.projection_error)),
            ("gradients came in", self.transfer),
            ("rounding error at most", _rounded(self.transfer_error)),
            ("gradients not rounded", len(self.transfer_kept) or None),
            ("weights sent in it", self.weights_widened),
            ("unreached parameters", len(self.unreached)),
            ("mode, seed", f"{self.mode}, {self.seed}"),
            ("precision", self.precision),
            ("device", self.device),
            (
                "ranges",
                ", ".join(f"{r.start}–{r.stop - 1} on {r.device}" for r in self.ranges or ()),
            ),
            ("devices lost", sum(r.devices_lost for r in self.ranges or ()) or None),
            ("not split", self.not_split),
            ("seconds", ", ".join(f"{name} {s:.3g}" for name, s in seconds.items() if s)),
            ("peak memory", html.size(self.peak_memory_bytes)),
            ("attempts", f"{self.attempts}, {self.resumed} resumed" if self.attempts > 1 else None),
            ("versions", f"gradbox {self.gradbox}, torch {self.torch}"),
        ]


def _rounded(number: float | None) -> str | None:
    return None if number is None else f"{number:.2g}"

"""The receipt: what a result says of its own making (safetensors metadata key `gradbox`)."""

from __future__ import annotations

from typing import Literal

from gradbox.protocol.again import OFTEN_CHANGED, CodeForm, code_again
from gradbox.protocol.stores import CurvatureView
from gradbox.protocol.views import EstimateView, View


class Seconds(View):
    """Where the time of a job went."""

    queued: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    cotangents: float = 0.0
    replay: float = 0.0
    samples: float = 0.0
    products: float = 0.0


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
    gradients that the file has, in `named_parameters` order, then those of the loss: a safetensors
    file keeps no order of its own. `unreached` names parameters that the loss does not depend on;
    their gradients are zeros. `rows` are, by group, the rows of each shard in Z before `order`;
    null for a z without dimensions. `stateful` says whether a forward pass changed the model's
    buffers; `changed_attributes` names attributes that it changed, themselves or inside, ten at
    most, with which no later job begins.
    `shards_recomputed` counts the shards whose `recomputed_blocks` were computed again in the
    backward pass.
    `replay_difference` is the largest |z' − z| over a shard, relative to that shard's
    largest |z|. Of per-sample jobs, `samples` and `outputs` count B and Y, `roads` are the rules
    that each parameter took, and `loops` why some took one backward pass a sample; `rows_compared`
    says how many rows of a shard were compared with autograd's; `against` is the
    job, or `against_group` the group, whose rows theirs were multiplied with, and
    `projection_error` bounds the standard deviation of ⟨Sx, Sy⟩ / (‖x‖‖y‖) over the seeds of a
    projection S. `fallbacks` counts, by the operation that was in the way, the shards of a mixed
    gradient whose tangent was not taken by forward mode. `resumed` counts the attempts that went on
    from a checkpoint.
    Of a product with a curvature, `kind` says which matrix it is of, and `attention` that attention
    was computed by the "math" kernel, which can be differentiated twice. Of one with the inverse,
    `damping` is λ; by vector, `iterations` counts the steps and `residuals` are
    ‖v − (H + λI) x‖ / ‖v‖, of a product made for it.
    Of a job with `transfer`, `transfer_error` bounds ‖rounded − g‖ / ‖g‖ of every gradient g, or of
    a sample's row of a parameter: 2⁻⁸ in bf16, 2⁻¹¹ in fp16, and more where numbers are below what
    fp16 holds in full; `transfer_kept` names gradients that the format does not
    hold, which came as they were; `weights_widened` counts `weights` that came in the format.
    Of a job that ran on several devices, `ranges` are the shards that each ran, and `bytes_moved`
    what crossed between them, by kind; `not_split` says why a job that asked
    for several ran on one.
    Of a step, `run` and `step` name it, `grad_norm` is ‖dL/dθ‖₂ before it was clipped, and `lr` the
    rates of the optimizer's groups. Of a job on a run's weights, `state_run` and `state_step` say
    which they were.
    Of a job on a store, `curvature` is what it fitted, or what queries were multiplied by.
    `peak_memory_bytes` is the process's peak on a CPU (model included), the allocator's on CUDA.
    `estimate` is what was measured of the like of the job before, if that was kept.
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
    recompute: str = "off"
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
    shards_recomputed: int = 0
    recomputed_blocks: list[str] = []
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
    projection_dim: int | None = None
    projection_error: float | None = None
    transfer: str | None = None
    transfer_error: float | None = None
    transfer_kept: list[str] = []
    weights_widened: int | None = None
    roads: dict[str, list[str]] | None = None
    loops: dict[str, str] | None = None
    rows_compared: Literal["none", "one", "all"] | None = None
    kind: str | None = None
    attention: str | None = None
    damping: float | None = None
    iterations: list[int] | None = None
    residuals: list[float] | None = None
    ranges: list[RangeView] | None = None
    bytes_moved: dict[str, int] | None = None
    not_split: str | None = None
    run: str | None = None
    step: int | None = None
    grad_norm: float | None = None
    lr: list[float] | None = None
    state_run: str | None = None
    state_step: int | None = None
    curvature: CurvatureView | None = None
    seconds: Seconds
    peak_memory_bytes: int
    memory_before_bytes: int
    attempts: int = 1
    resumed: int = 0
    estimate: EstimateView | None = None

    def code(self, form: CodeForm = "python") -> str:
        """Return code that runs the job once more, from what its box has of it.

        It is Python, the TOML that `gradbox submit` reads, or a call of curl. A job's page on the
        dashboard has more of its options in it.
        """
        options = {name: getattr(self, name) for name in OFTEN_CHANGED}
        at_cotangents = self.computation == "gradient" and self.loss is None
        return code_again(self.job, form, {} if at_cotangents else options)

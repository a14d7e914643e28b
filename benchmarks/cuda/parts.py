"""The parts of `python -m benchmarks cuda`, and the section that they make together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from benchmarks.cuda import decoder, graphs, mixed, per_sample, replay, service, upload
from benchmarks.cuda.clock import Ceilings, Clock, measure_ceilings
from benchmarks.cuda.sizes import DRY, FULL, Sizes
from gradbox_engine.model.precision import arithmetic

Part = Callable[[Clock, Ceilings, Sizes], str]

PARTS: Final[Mapping[str, Part]] = {
    "engine": lambda clock, _, sizes: replay.measure(clock, sizes),
    "per-sample": per_sample.measure,
    "upload": upload.measure,
    "decoder": lambda clock, _, sizes: decoder.measure(clock, sizes),
    "mixed": lambda clock, _, sizes: mixed.measure(clock, sizes),
    "graphs": lambda clock, _, sizes: graphs.measure(clock, sizes),
    "service": lambda clock, _, sizes: service.measure(clock, sizes),
}


def measure_cuda(names: Sequence[str], *, device: str, dry: bool) -> tuple[list[str], bool]:
    """Run parts in order.

    Returns:
        Their sections, that of a part which raised with what it raised; and whether none did.
    """
    if device != "cpu" and not torch.cuda.is_available():
        return ["## On a GPU\n\nNot measured: there is no CUDA device here."], False
    sizes = DRY if dry else FULL
    clock = Clock(torch.device("cuda", 0) if device != "cpu" else torch.device("cpu"))
    ceilings = measure_ceilings(clock, copied_bytes=sizes.copied_bytes, side=sizes.side)
    sections = [_about(clock, ceilings, sizes)]
    well = True
    for name in names:
        print(f"{name} …", flush=True)
        try:
            # The peers, too: torch itself lets convolutions use TensorFloat-32.
            with arithmetic("fp32"):
                sections.append(PARTS[name](clock, ceilings, sizes))
        except Exception:  # noqa: BLE001 - the other parts are worth their figures
            well = False
            last = traceback.format_exc().splitlines()[-12:]
            sections.append("\n".join([f"## {name}: failed", "", "```", *last, "```"]))
        print(sections[-1], flush=True)
        if clock.on_cuda:
            torch.cuda.empty_cache()
    return sections, well


def _about(clock: Clock, ceilings: Ceilings, sizes: Sizes) -> str:
    name = torch.cuda.get_device_name(clock.device) if clock.on_cuda else "CPU"
    small = " **Sizes of a trial run: no figure here says anything.**" if sizes is DRY else ""
    return (
        f"On {name}; {ceilings}. Medians of {sizes.rounds} rounds in turn, half the distance "
        f"between the quartiles behind ±; peaks are the allocator's, beyond what was there; "
        f"TensorFloat-32 is off where nothing else is said.{small}"
    )

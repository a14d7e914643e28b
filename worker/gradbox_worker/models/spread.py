"""A model that is larger than one GPU, laid over several by accelerate.

`device_map="auto"` gives each GPU modules in their order, and a hook of each module brings there
what it is called with. What finds no room accelerate would leave on a disk, and read for each call:
such a model is refused, for it has no gradients there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from gradbox_engine.host_memory import available_bytes
from gradbox_worker.errors import WeightsDoNotFit
from gradbox_worker.models.models_file import ModelEntry
from gradbox_worker.models.packages import package

# Of what is free on a GPU, what the weights of a model over several may take.
WEIGHTS_SHARE: Final = 0.9
MOST_LISTED: Final = 5


def spread_over(entry: ModelEntry, devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return what `from_pretrained` is told, to lay a model over devices.

    Raises:
        ModelsFileError: accelerate is not installed.
    """
    package(entry, "accelerate")
    room = {
        device.index if device.type == "cuda" else device.type: int(
            _free_bytes(device) * WEIGHTS_SHARE
        )
        for device in devices
    }
    return {"device_map": "auto", "max_memory": room}


def refuse_offloaded(entry: ModelEntry, model: nn.Module, *, num_devices: int) -> None:
    """Refuse a model of which a part found no room.

    Raises:
        WeightsDoNotFit: a part did not.
    """
    # Not all versions say in `hf_device_map` what lies on the disk; all leave it without numbers.
    tensors = chain(model.named_parameters(), model.named_buffers())
    left = sorted(name for name, tensor in tensors if tensor.is_meta)
    if left:
        more = f" and {len(left) - MOST_LISTED} more" if len(left) > MOST_LISTED else ""
        raise WeightsDoNotFit(
            f"models.{entry.name}: expected {num_devices} GPUs to hold its weights, but "
            f"{', '.join(left[:MOST_LISTED])}{more} found no room; set a larger gpus_per_device, "
            f'or register it in half precision (kwargs = {{dtype = "bfloat16"}})',
            wanted_bytes=0,
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()

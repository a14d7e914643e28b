"""Small results of the device, copied to the host without waiting for them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a device tensor in the host's memory.

    On a CPU it is done at once. On CUDA it runs behind the kernels that compute it, and
    `value` waits for no other work than that.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._value = pinned.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._value = tensor.detach().cpu()

    @property
    def done(self) -> bool:
        """Whether `value` would return at once."""
        if self._event is None:
            return True
        done: bool = self._event.query()  # type: ignore[no-untyped-call]
        return done

    def value(self) -> Tensor:
        """Return the tensor on the host, waiting for the copy if need be."""
        if self._event is not None:
            self._event.synchronize()
        return self._value

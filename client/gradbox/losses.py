"""The built-in losses by name: `from gradbox.losses import info_nce`; they need torch."""

from gradbox.tensors.tensor_bytes import is_torch_importable

if not is_torch_importable():
    raise ModuleNotFoundError(
        "gradbox.losses: expected torch on this machine, found none: "
        "pip install 'gradbox[torch]', or name the loss for the box, as in Builtin('info_nce')"
    )

from gradbox.builtin_losses.functions import (
    BUILTIN,
    barlow_twins,
    clip_symmetric,
    cox_partial_likelihood,
    cross_entropy,
    info_nce,
    mmd,
    supervised_contrastive,
    triplet_all,
    vicreg,
    wasserstein_1d,
)

__all__ = [
    "BUILTIN",
    "barlow_twins",
    "clip_symmetric",
    "cox_partial_likelihood",
    "cross_entropy",
    "info_nce",
    "mmd",
    "supervised_contrastive",
    "triplet_all",
    "vicreg",
    "wasserstein_1d",
]

"""What to write instead of something that a traced function may not do."""

from __future__ import annotations

from typing import Final

import torch

ON_YOUR_SIDE: Final = (
    "or keep the code as it is and run it on your side, on the outputs of client.model(...): "
    "docs/remote_autograd.md"
)
RUN_IT_HERE: Final = (
    "run it on your side, on the outputs of client.model(...), with any loss: "
    "docs/remote_autograd.md"
)
NO_NUMBER: Final = (
    "sizes and tensors have no value while the function is traced, so int(), float() and range() "
    "of them cannot be recorded: divide by a size as it is, or use //, torch.arange, torch.clamp "
    f"or math functions called as math.sqrt(...) or math.trunc(...); {ON_YOUR_SIDE}"
)
CONTROL_FLOW: Final = (
    "write it with torch.where, a mask or torch.clamp; a choice that does not depend on tensors "
    f"can be an argument with a Python value; {ON_YOUR_SIDE}"
)
FORM: Final = (
    "ranks, sizes and dtypes are not known while the function is traced: leave the way that your "
    f"tensors take, or choose by an argument with a Python value; {ON_YOUR_SIDE}"
)
SIZE: Final = "write z.shape itself, z.shape.numel() for the product, or as many names as there are"
LOOP: Final = (
    "write it with batched operations, unpack into as many names as there are entries, or take "
    f"pieces by chunk(n); {ON_YOUR_SIDE}"
)
OUTSIDE: Final = (
    f"decide outside the function, or by an argument with a Python value; {ON_YOUR_SIDE}"
)
PRINTED: Final = (
    "the text of a value is asked for that is not known yet",
    'leave print() out (returns=("grads", "outputs") brings z back), or decide outside the '
    f"function; {ON_YOUR_SIDE}",
)
_VALUE = (
    "keep it a tensor: the function runs once on symbols, before any value is known, and the box "
    f"does the arithmetic; {ON_YOUR_SIDE}"
)
_RANDOM = (
    "a loss must be a function of its arguments: draw the numbers outside and pass them in "
    "loss_inputs"
)
_DROPOUT = f"call .eval() on it; {_RANDOM}"
_GRADIENT = (
    "a loss is differentiated by the box; write the formula of the derivative instead, "
    f"{ON_YOUR_SIDE}"
)
CUSTOM: Final = (
    "write the formula so that autograd differentiates it, with .detach() where the gradient must "
    f"not flow; {ON_YOUR_SIDE}"
)
HOOKED: Final = "the box would not call it: write what it does to the gradient with .detach()"
KEPT: Final = (
    "the function reads what an earlier trace of it left in a variable, a list or an attribute",
    "keep running state in a buffer of an nn.Module, and make a tensor that is cached outside the "
    "function: docs/graphs.md",
)
_ORIGINAL = "use the function or module that it was made from"
COMPILED: Final = ("what torch.compile made cannot be traced", _ORIGINAL)
SCRIPTED: Final = ("what torch.jit made cannot be traced", _ORIGINAL)
LAZY: Final = (
    "nn.{} has no parameters yet; call it once on a tensor as it will get, before it is traced"
)
TRANSFORMED: Final = (
    "torch.func and torch.vmap transform a function of tensors with values",
    f"write it with batched operations; {ON_YOUR_SIDE}",
)
_DETACH = "use .detach()"
_DTYPE = "use .to(torch.float32) or another dtype"
_FILLED = (
    "memory without values has somebody else's in it; use torch.zeros, zeros_like or new_zeros"
)
_UNCHECKED = (
    "torch does not check the values that it is given, and it would read the box's memory; compute "
    "this part on your side, on the outputs of client.model(...): docs/remote_autograd.md"
)
_SOLVE = "use torch.linalg.solve or solve_triangular"
_LINALG = (
    "use its successor in torch.linalg: cholesky, eig, eigh, lstsq, qr, solve, solve_triangular, "
    "or svd, which gives Vᴴ in place of V"
)
_STACK = "use torch.stack for tensors and torch.full((), n) for a size, which also keep gradients"

INSTEAD: Final[dict[str, str]] = {
    **dict.fromkeys("item tolist numpy __array__ __float__ __int__ __index__".split(), _VALUE),
    **dict.fromkeys(
        """
        rand rand_like randn randn_like randint randint_like randperm bernoulli bernoulli_
        multinomial normal normal_ uniform_ random_ exponential_ cauchy_ geometric_ log_normal_
        poisson gumbel_softmax rrelu manual_seed kaiming_uniform_ xavier_uniform_ trunc_normal_
        kaiming_normal_ xavier_normal_
        """.split(),
        _RANDOM,
    ),
    **dict.fromkeys(
        """
        dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_dropout
        feature_alpha_dropout
        """.split(),
        _DROPOUT,
    ),
    **dict.fromkeys("grad backward requires_grad_ retain_grad register_hook".split(), _GRADIENT),
    **dict.fromkeys("data __set__ detach_".split(), _DETACH),
    **dict.fromkeys("empty empty_like new_empty empty_strided new".split(), _FILLED),
    **dict.fromkeys("tensor as_tensor asarray from_numpy new_tensor".split(), _STACK),
    **dict.fromkeys(
        "grid_sample grid_sampler embedding_bag max_unpool1d max_unpool2d max_unpool3d".split(),
        _UNCHECKED,
    ),
    **dict.fromkeys("linalg_lu_solve linalg_ldl_solve".split(), _SOLVE),
    **dict.fromkeys("cholesky eig lstsq qr solve svd symeig triangular_solve".split(), _LINALG),
    **dict.fromkeys("gru lstm rnn_relu rnn_tanh gru_cell lstm_cell".split(), RUN_IT_HERE),
    "linear_cross_entropy": f"use F.cross_entropy(F.linear(input, weight), target); {ON_YOUR_SIDE}",
    "pad_sequence": "pad each piece by torch.nn.functional.pad, and stack them",
    "type": _DTYPE,
}

_GIVE = (
    "its gradient would be lost: pass it in loss_inputs, or make the loss an nn.Module that holds "
    "it as a parameter or submodule, or detach it"
)
GENERAL: Final = f"write it with the functions that docs/graphs.md lists; {ON_YOUR_SIDE}"


def instead_of(name: str) -> str:
    """Return what to do instead of calling the torch function or method of that name."""
    return INSTEAD.get(name, GENERAL)


def foreign(tensor: torch.Tensor) -> tuple[str, str]:
    """Return what is wrong with a tensor that requires grad and is not the loss's, and what to do.

    Its gradient would be lost.
    """
    shape = tuple(tensor.shape)
    what = f"a tensor of shape {shape} that requires grad is not a parameter of the loss"
    if tensor.grad_fn is not None:
        what = f"a tensor of shape {shape} was computed from trainable tensors outside the function"
    return what, _GIVE

"""A registered model as a callable whose outputs have a `grad_fn`: any loss, ordinary autograd.

    f = client.model("minilm", mode="train", seed=0)
    zs = [f(x) for x in shards]             # nothing is sent yet
    loss = any_python(torch.cat(zs))        # one forward job, for all calls so far
    loss.backward()                         # one gradient job, at the cotangents of their outputs
    f.apply_to(local_model)

Call i of the object, counted from 0 over its life and over all entry points and modes, runs under
the random stream (seed, 0, i):

    for i, x in enumerate(shards):
        with shard_stream(seed, group=0, shard=i):
            zs.append(model(**x))

Read `model` first. It records each call (`calls`) and returns a tensor that is fetched when it is
first used; `forward_job` sends all calls so far as one job and gives their outputs a `grad_fn`,
made of the functions in `autograd`, whose backward runs the gradient job. All jobs are given the
same `RemoteOptions`. The user's weights go along where they changed, and buffers from one job to
the next: `state`.
"""

from gradbox.tensors.tensor_bytes import is_torch_importable

if not is_torch_importable():
    raise ModuleNotFoundError(
        "client.model: expected torch on this machine, whose autograd a remote model joins, found "
        "none: pip install 'gradbox[torch]', or submit a Forward and a Gradient"
    )

from gradbox.remote.forward_job import RemoteOptions, RemoteOutput
from gradbox.remote.model import RemoteModel

__all__ = ["RemoteModel", "RemoteOptions", "RemoteOutput"]

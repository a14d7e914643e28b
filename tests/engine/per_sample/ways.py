"""Ways to use a parameter that are odd, each with its shards: what no rule of a layer has in view.

`zoo` has the layers themselves, in one call. Here are weights that a model makes, functions that
nothing shows, samples that move or are left out, hooks, models that change as they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.case_models import RunAgain
from tests.engine.per_sample.zoo import Written

B, T = 5, 6
Shard = dict[str, Tensor]
Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Way:
    """A model, its shards, and what its rows are compared with.

    `plain` computes the same where naive code cannot differentiate the model itself. `loops` are
    the parameters that take one backward pass a sample, for a reason that begins with `why`; None
    leaves them open.
    """

    model: nn.Module
    shards: list[Shard]
    loops: set[str] | None = field(default_factory=set)
    why: str = ""
    plain: nn.Module | None = None
    mode: Any = "eval"
    near: float = 1.0  # times the tolerance of float64


def p(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


def normal(*shapes: tuple[int, ...]) -> list[Shard]:
    return [{"0": torch.randn(*shape)} for shape in shapes]


def written(forward: Forward, shards: list[Shard], **parts: Any) -> Way:
    how = {name: parts.pop(name) for name in ("loops", "why", "near") if name in parts}
    model = Written(forward, **{n: x for n, x in parts.items() if type(x) is not Tensor})
    for name, buffer in parts.items():
        if type(buffer) is Tensor:
            model.register_buffer(name, buffer)
    return Way(model, shards, **how)


def two_layers(forward: Forward, shards: list[Shard], inner: int = 5, **how: Any) -> Way:
    return written(forward, shards, a=nn.Linear(inner, 4), b=nn.Linear(4, 3), **how)


# --- weights that a model makes -----------------------------------------------------------------


def _triangular(m: Any, x: Tensor) -> Tensor:
    """L U, with entries at indices and a diagonal of ones, as flows have them."""
    rows, columns = torch.tril_indices(4, 4, -1, device=x.device)
    lower, upper = x.new_zeros(4, 4), x.new_zeros(4, 4)
    lower[rows, columns] = m.p
    lower[range(4), range(4)] = 1.0
    upper[columns, rows] = m.q.exp()
    upper[range(4), range(4)] = F.softplus(m.d)
    return F.linear(F.linear(x, upper), lower).tanh()


def _sliced(m: Any, x: Tensor) -> Tensor:
    weight = x.new_zeros(4, 4)
    weight[1:, 0] = m.d[:3]
    weight[2] = m.d
    return x @ weight + weight[2]


def _read_between(m: Any, x: Tensor) -> Tensor:
    """The matrix is used, and then written to again."""
    weight = x.new_zeros(4, 4)
    weight[0] = m.d
    h = (x * weight[0].clone()).tanh()
    weight[1] = m.p[:4]
    return h @ weight


def _written_over(m: Any, x: Tensor) -> Tensor:
    """What a layer has used is written over, of which autograd needs nothing."""
    weight = x.new_zeros(4, 4)
    weight[0] = m.d
    h = F.linear(x, weight)
    weight[0] = m.p[:4]
    return F.linear(h.tanh(), weight)


def _of_the_batch(m: Any, x: Tensor) -> Tensor:
    """An activation is written into a matrix of parameters."""
    h = x.new_zeros(len(x), 4)
    h[:, 1:] = (x @ (m.w * 1))[:, 1:]
    h[:, 0] = m.d[0]
    return h.tanh()


class _Rounded(torch.autograd.Function):
    """Rounds, and passes gradients straight through where nothing is clipped."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (weight * 4).round().clamp(-3, 3) / 4

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return cotangent * (weight.abs() <= 0.75)


class _Product(torch.autograd.Function):
    """A product whose gradient NumPy computes, which takes no batches."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return torch.from_numpy((cotangent @ b.T).cpu().numpy()).to(a), a.T @ cotangent


def _filled(m: Any, x: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(4, 4, 1, device=x.device)
    matrix = torch.zeros(4, 4, dtype=x.dtype, device=x.device)
    matrix[rows, columns] = m.p
    upper = matrix * 2.0
    matrix[columns, rows] = -m.p
    return m.w + upper.T + matrix.matrix_exp()


def _sparse(m: Any, x: Tensor) -> Tensor:
    places = torch.tensor([[0, 0, 1, 2, 3, 3], [1, 3, 2, 0, 0, 3]], device=x.device)
    return m.w + torch.sparse_coo_tensor(places, m.p, (4, 4))


MADE: dict[str, Forward] = {
    "rounded": lambda m, x: _Rounded.apply(m.w * m.p[0]),
    "by NumPy": lambda m, x: _Product.apply(m.w, m.w * m.p[0]),
    "filled": _filled,
    "sparse": _sparse,
    "to that of x": lambda m, x: m.w.to(x) * m.p.sum().to(x),
    "of the type of x": lambda m, x: m.w.type_as(x) * m.p.sum().type_as(x),
}
ASSIGNED: dict[str, Forward] = {
    "at indices": _triangular,
    "at slices": _sliced,
    "twice": _read_between,
    "over what was used": _written_over,
    **{
        f"from what is {name}": lambda m, x, make=make: F.linear(x, make(m, x)).tanh()
        for name, make in MADE.items()
    },
}


def _weights() -> Iterator[tuple[str, Callable[[], Way]]]:
    def way(forward: Forward, **how: Any) -> Way:
        return written(forward, normal((B, 4)), p=p(6), q=p(6), d=p(4), w=p(4, 4), **how)

    for name, forward in ASSIGNED.items():
        yield f"a weight written {name}", lambda forward=forward: way(forward)
    yield "activations among parameters", lambda: way(_of_the_batch, loops=None)


# --- products of the field ----------------------------------------------------------------------


def _repeated(m: Any, x: Tensor) -> Tensor:
    """Two heads that share their dim with the samples."""
    heads = x.reshape(len(x) * 2, T // 2, 4)
    scores = torch.bmm(heads, m.q.tanh().repeat(len(x), 1, 1).mT)
    return scores.reshape(len(x), -1).tanh()


def _written_to(m: Any, x: Tensor) -> Tensor:
    """The product is changed in place behind the call."""
    scores = torch.einsum("btd,hsd->bhts", x, m.q.exp())
    scores *= 0.5
    return scores.flatten(1).tanh()


def _heads_first(m: Any, x: Tensor) -> Tensor:
    heads = x.reshape(len(x) * T, 2, 2).permute(1, 0, 2)
    h = torch.baddbmm(m.b[:, None], heads, m.w)
    return h.transpose(0, 1).reshape(len(x), -1).tanh()


def _biased_attention(m: Any, x: Tensor) -> Tensor:
    h = x.reshape(len(x), T, 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(h, h, h, attn_mask=m.table[m.at]).flatten(1)


def _windows(m: Any, x: Tensor) -> Tensor:
    """Shifted windows: their masks are repeated for every sample, and a learned bias is added."""
    windows = x.reshape(len(x) * 2, 1, T // 2, 4)
    masks = torch.tensor([0.0, -1.0]).to(x)[:, None, None, None].repeat(len(x), 1, 1, 1)
    h = F.scaled_dot_product_attention(windows, windows, windows, attn_mask=masks * m.s + m.q)
    return h.reshape(len(x), -1)


def _gathered(m: Any, x: Tensor) -> Tensor:
    """Each token's expert, whose weights are gathered."""
    tokens = x.reshape(-1, 4)
    experts = m.gate(tokens).argmax(1)
    h = torch.bmm(m.w[experts], tokens[:, :, None]) + m.b[experts][:, :, None]
    return h.reshape(len(x), -1).tanh()


def _tokens() -> list[Shard]:
    return normal((B, T, 4))


PRODUCTS: dict[str, Callable[[], Way]] = {
    "repeat": lambda: written(_repeated, _tokens(), q=p(2, 3, 4)),
    "tile": lambda: written(lambda m, x: (x * m.q.tile(1, 3, 2)).sum(1), _tokens(), q=p(2, 2)),
    "einsum": lambda: written(_written_to, _tokens(), q=p(2, 3, 4)),
    "activation used twice": lambda: written(
        lambda m, x: m.a(m.l(m.a(x))).sum(1), _tokens(), a=nn.PReLU(), l=nn.Linear(4, 4)
    ),
    "baddbmm": lambda: written(_heads_first, _tokens(), w=p(2, 2, 3), b=p(2, 3)),
    "attention with a table of biases": lambda: written(
        _biased_attention, _tokens(), table=p(4), at=torch.randint(0, 4, (2, T, T))
    ),
    "windows": lambda: written(_windows, _tokens(), q=p(1, T // 2, T // 2), s=p(1)),
    "gathered experts": lambda: written(
        _gathered, _tokens(), gate=nn.Linear(4, 3, bias=False), w=p(3, 2, 4), b=p(3, 2)
    ),
    "a transposed convolution at one position": lambda: written(
        lambda m, x: m.b(m.a(x).mT).flatten(1).sum(1, keepdim=True),
        normal((3, 4, 2)),
        a=nn.ConvTranspose1d(4, 4, 2, padding=1, groups=2),
        b=nn.Linear(4, 3),
    ),
    "a sparse matrix times activations": lambda: written(
        lambda m, x: torch.sparse.mm(m.mix.to_sparse(), m.a(x).t()).t(),
        normal((3, 5)),
        a=nn.Linear(5, 4),
        mix=torch.eye(4).roll(1, 0),
    ),
    "a bag with sparse gradients": lambda: written(
        lambda m, x: m.e((x > 0).long()).sin(),
        normal((3, 5)),
        e=nn.EmbeddingBag(2, 3, mode="mean", sparse=True),
        loops=None,
    ),
    "function transforms": lambda: written(
        lambda m, x: torch.func.vmap(torch.func.grad(lambda h: (h @ m.w).sin().sum()))(x),
        normal((3, 5)),
        w=p(5, 5),
        loops={"w"},
    ),
}

# Tables whose padding row has no gradient, which torch's batching rule of a look-up forgets.
PADDED = [{"0": torch.tensor(ids)} for ids in ((0, 1, 2, 0, 3), (1, 2, 3, 2, 0), (0, 0))]
TABLES: dict[str, Callable[[], Way]] = {
    "a padded table": lambda: written(
        lambda m, ids: m.e(ids).sin(), PADDED, e=nn.Embedding(4, 3, padding_idx=0, max_norm=0.5)
    ),
    "a padded table by its function": lambda: written(
        lambda m, ids: torch.embedding(m.w, ids, 0).sin(), PADDED, w=p(4, 3)
    ),
}


# --- samples that are left out, sent elsewhere, or moved -----------------------------------------

D, EXPERTS = 4, 6


def _hit(m: Any, tokens: Tensor) -> Tensor:
    """Only experts that a token is sent to are called."""
    expert = m.gate(tokens).argmax(1)
    h = torch.zeros_like(tokens)
    for number in expert.unique():
        rows = torch.where(expert == number)[0]
        h.index_add_(0, rows, F.linear(tokens[rows], m.w[number], m.b[number]).tanh())
    return h


def _grouped(m: Any, tokens: Tensor) -> Tensor:
    """One grouped product of sorted tokens, by a kernel that takes no float64."""
    expert, order = m.gate(tokens).argmax(1).sort(stable=True)
    ends = torch.arange(EXPERTS, device=tokens.device)
    offs = torch.searchsorted(expert, ends, right=True).to(torch.int32)
    h = torch._grouped_mm(tokens[order].float(), m.w.float(), offs=offs).to(tokens)
    z = torch.zeros_like(h)
    z[order] = (h + m.b[expert]).tanh()
    return z


def _mixture(experts: Forward, sizes: tuple[int, ...], **how: Any) -> Way:
    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = m.first(x).reshape(-1, D).tanh()
        return m.last((tokens + experts(m, tokens)).view(len(x), -1))

    return written(
        forward, normal(*((size, 3, D) for size in sizes)),
        first=nn.Linear(D, D), gate=nn.Linear(D, EXPERTS, bias=False), w=p(EXPERTS, D, D),
        b=p(EXPERTS, D), last=nn.Linear(3 * D, 2), **how,
    )  # fmt: skip


def _of_tokens(m: Any, x: Tensor, keep: Tensor) -> Tensor:
    h = x.new_zeros(*keep.shape, 4)
    h[keep] = m.a(x[keep]).tanh()
    return m.b(h.sum(1))


def _tokens_left_out() -> Way:
    x, shards = torch.randn(6, 4, 5), []
    for places in ([], [(1, 3)], [(1, 2), (1, 3), (4, 2), (4, 3)], [(b, 3) for b in range(6)]):
        keep = torch.ones(6, 4, dtype=torch.bool)
        for place in places:
            keep[place] = False
        shards.append({"x": x, "keep": keep})
    return two_layers(_of_tokens, shards, loops=None)


def _routed(m: Any, x: Tensor) -> Tensor:
    first = x[:, 0] > 0
    z = x.new_zeros(x.shape[0], 3)
    z[first] = m.a(x[first])
    z[~first] = m.b(x[~first])
    return z


def _routing() -> Way:
    mixed = torch.randn(12, 5)
    alike = mixed.clone()
    alike[:, 0] = alike[:, 0].abs() + 0.1
    shards = [{"0": x} for x in (alike, mixed, -alike)]
    return written(_routed, shards, a=nn.Linear(5, 3), b=nn.Linear(5, 3), loops=None)


def _by_writing(h: Tensor, back: Tensor) -> Tensor:
    z = torch.empty_like(h)
    z[back.argsort()] = h
    return z


UNDONE: dict[str, Forward] = {
    "index": lambda h, back: h[back],
    "index_select": lambda h, back: h.index_select(0, back),
    "gather": lambda h, back: torch.gather(h, 0, back[:, None].expand_as(h)),
    "writing": _by_writing,
}


def _sorted_by_length(undo: Forward) -> Way:
    def forward(m: Any, x: Tensor, n: Tensor) -> Tensor:
        order = torch.argsort(n, descending=True, stable=True)
        return undo(m.b(m.a(x[order]).tanh()), torch.argsort(order))

    x, lengths = torch.randn(6, 5), ([5] * 6, [1, 5, 4, 3, 9, 2], [1, 5, 3, 2, 9, 4])
    return two_layers(forward, [{"x": x, "n": torch.tensor(n)} for n in lengths], loops=None)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return h[order].clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g[ctx.saved_tensors[0].argsort()], None


def _narrowed(h: Tensor, k: int) -> Tensor:
    rest = len(h) - k
    return torch.cat([h.narrow(0, rest, k), h.narrow(0, 0, rest)])


def _split(h: Tensor, k: int) -> Tensor:
    front, back = h.split([len(h) - k, k])
    return torch.cat([back, front])


def _order(h: Tensor, k: int) -> Tensor:
    return (torch.arange(len(h), device=h.device) + (len(h) - k)) % len(h)


def _by_matrix(h: Tensor, k: int) -> Tensor:
    matrix = torch.eye(len(h), dtype=h.dtype, device=h.device)[_order(h, k)]
    return torch.sparse.mm(matrix.to_sparse(), h.flatten(1)).clone().view_as(h)


MOVES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "roll": lambda h, k: h.roll(k, 0),
    "roll of all numbers": lambda h, k: h.flatten().roll(k * h[0].numel()).view_as(h),
    "slices": lambda h, k: torch.cat([h[len(h) - k :], h[: len(h) - k]]),
    "narrow": _narrowed,
    "split": _split,
    "a table of activations": lambda h, k: F.embedding(_order(h, k), h.flatten(1)).view_as(h),
    "a sparse matrix": _by_matrix,
    "a custom Function": lambda h, k: _Permuted.apply(h, _order(h, k)),
}


def _moved(move: Callable[[Tensor, int], Tensor]) -> Way:
    """A layer between two moves of the samples, which data have do nothing on the first shard."""

    def forward(m: Any, x: Tensor) -> Tensor:
        k = int(x[:, 0, 0].min().item() > 0)
        h = m.mid(move(m.first(x).tanh(), k)).tanh()
        return m.last(move(h, (len(x) - k) % len(x)).flatten(1))

    shards = normal((B, 2, 3), (B, 2, 3))
    for shift, shard in zip((-1.0, 1.0), shards, strict=True):
        shard["0"][:, 0, 0] = torch.arange(B) + shift
    parts = {"first": nn.Linear(3, 4), "mid": nn.Linear(4, 4), "last": nn.Linear(8, 2)}
    return written(forward, shards, **parts, loops=None)


def _alike(time_first: bool) -> Way:
    """Ids that are all equal on the first shard, which do not settle an order."""

    def forward(m: Any, ids: Tensor) -> Tensor:
        ids = ids.t() if time_first else ids
        h = m.mid(m.table(ids.reshape(-1)).tanh()).view(*ids.shape, -1)
        return m.last(h.tanh().sum(0 if time_first else 1))

    shards = [{"0": torch.zeros(B, 3, dtype=torch.long)}, {"0": torch.randint(7, (B, 3))}]
    parts = {"table": nn.Embedding(7, 4), "mid": nn.Linear(4, 4), "last": nn.Linear(4, 2)}
    return written(forward, shards, **parts, loops=None)


SELECTED: dict[str, Callable[[], Way]] = {
    "experts that tokens are sent to": lambda: _mixture(
        _hit, (40, 5, 2), loops=None, why="data decide which samples"
    ),
    "a grouped product": lambda: _mixture(_grouped, (7,), loops={"w", "b"}, near=1e5),
    "tokens left out": _tokens_left_out,
    "hard routing": _routing,
    "a token for each sample": lambda: written(
        lambda m, x: m.a(torch.cat([torch.cat([m.c] * len(x)), x[:, None]], 1)).tanh().sum(1),
        normal((6, 5)),
        a=nn.Linear(5, 3),
        c=p(1, 1, 5),
        loops={"c"},
    ),
    "samples in reverse": lambda: two_layers(
        lambda m, x: m.b(m.a(x.flip(0)).tanh()).flip(0), normal((6, 5), (5, 5)), loops=None
    ),
    **{
        f"samples sorted, undone by {name}": lambda undo=undo: _sorted_by_length(undo)
        for name, undo in UNDONE.items()
    },
    **{f"samples moved by {n}": lambda move=move: _moved(move) for n, move in MOVES.items()},
    "ids alike, time first": lambda: _alike(True),
    "ids alike": lambda: _alike(False),
}


# --- what no function call shows, and hooks -------------------------------------------------------


@torch.jit.script
def _scripted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def _slope(m: Any, x: Tensor, *, create_graph: bool = True) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x @ m.weight).tanh().sum(), x, create_graph=create_graph)[0]


def _hidden(m: Any, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return (x @ m.weight).tanh()


def _written_by_a_view(m: Any, x: Tensor) -> Tensor:
    corners = torch.eye(4, dtype=x.dtype, device=x.device).view(2, 2, 4)
    made = F.linear(corners, m.weight, m.weight[0])
    made.view(4, 4).sin_()
    return (x.tanh() @ made.flatten(0, 1)).tanh()


UNSEEN: dict[str, Forward] = {
    "autograd": _slope,
    "a transform": lambda m, x: torch.func.grad(lambda x: (x @ m.weight).tanh().sum())(x),
    "forward mode": lambda m, x: torch.func.jvp(lambda x: (x @ m.weight).tanh(), (x,), (x.sin(),))[
        1
    ],
    "vmap": lambda m, x: torch.func.vmap(lambda row: (row @ m.weight).tanh())(x),
    "TorchScript": lambda m, x: _scripted(x, m.weight),
    "disabled functions": _hidden,
    "a kept view": lambda m, x: (x.tanh() @ m.turned).tanh(),
    "a write through a view": _written_by_a_view,
}


def _unseen(unseen: Forward, **how: Any) -> Way:
    """A seen use of a weight, and an unseen one that adds little."""
    way = written(
        lambda m, x: x @ m.weight + 0.08 * unseen(m, x), normal((6, 4)), weight=p(4, 4), **how
    )
    model = way.model

    def turn() -> None:
        model.__dict__["turned"] = model.weight.T  # type: ignore[union-attr]

    model.__dict__["turn"] = turn  # when the model is where it will be called
    return way


def _written_in_views(m: Any, x: Tensor) -> Tensor:
    kept = torch.zeros(len(x), 2, 4, dtype=x.dtype, device=x.device)
    kept[:, 0].copy_(x @ m.weight)
    kept[:, 1] = x
    return (kept @ m.weight).relu_().sum(1)


def _inferred(m: Any, x: Tensor) -> Tensor:
    """A parameter used in inference mode is a constant there."""
    with torch.inference_mode():
        gate = (x @ m.weight).sigmoid()
    return x @ m.weight * gate.clone()


def _unseen_table(m: Any, ids: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        looked_up = m.table(ids)
    return m.layer(looked_up).sum(1)


def _hooked_output(m: Any, h: Tensor) -> Tensor:
    h = m.layer(h)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / 4)
    return h.tanh()


def _hooked(*shape: int, weight: bool) -> Way:
    """A hooked layer whose gradient is small beside that of the last one."""
    layer, head = nn.Linear(4, 4), nn.Linear(4, 3)
    with torch.no_grad():
        head.weight.mul_(0.02)
    if weight:
        layer.weight.register_hook(lambda gradient: gradient / 4)
    hooked = layer if weight else Written(_hooked_output, layer=layer)
    return Way(
        nn.Sequential(nn.Linear(4, 4), hooked, head, nn.Flatten()),
        normal(shape),
        None,
        "a hook changes its gradient",
    )


NARROW: dict[str, Callable[[], Way]] = {
    **{
        f"a use hidden by {name}": lambda unseen=unseen: _unseen(
            unseen, loops={"weight"}, why="it is used by what no function call shows"
        )
        for name, unseen in UNSEEN.items()
    },
    "a hooked weight": lambda: _hooked(5, 4, weight=True),
    "a hooked weight over positions": lambda: _hooked(5, 3, 4, weight=True),
    "a hooked activation": lambda: _hooked(5, 4, weight=False),
    "a hooked activation over positions": lambda: _hooked(5, 3, 4, weight=False),
}
"""What adds little to the rows, and has to be there in 16 bits as well."""

SEEN: dict[str, Callable[[], Way]] = {
    "a slope as a constant": lambda: _unseen(lambda m, x: _slope(m, x, create_graph=False)),
    "writes into views": lambda: written(_written_in_views, normal((6, 4)), weight=p(4, 4)),
    "inference mode": lambda: written(_inferred, normal((6, 4)), weight=p(4, 4)),
    "a hidden sparse table": lambda: written(
        _unseen_table,
        [{"ids": torch.randint(7, (B, 3))}],
        table=nn.Embedding(7, 4, sparse=True),
        layer=nn.Linear(4, 3),
        loops={"table.weight"},
    ),
}


# --- backward passes of their own, writes in place, models that change ----------------------------


class _Watchful(torch.autograd.Function):
    """2 x, whose backward pass looks at a number and therefore does not vectorise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g if g.abs().max().item() > 1e30 else g * 2


def _reversible() -> Way:
    parts = {
        "before": nn.Linear(4, 4),
        "block": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)),
        "after": nn.Linear(4, 3),
    }

    def with_block(run: Forward) -> nn.Module:
        def forward(m: Any, x: Tensor) -> Tensor:
            h = m.before(x)
            return m.after((h + run(m, h)).tanh())

        return Written(forward, **parts)

    plain = with_block(lambda m, h: m.block(h))
    loops = {f"block.{n}" for n, _ in parts["block"].named_parameters()}
    model = with_block(lambda m, h: RunAgain.apply(h, m.block))
    return Way(model, normal((B, 4)), loops, plain=plain)


def _reentrant() -> Way:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(checkpoint(lambda y: m.a(y).tanh(), x, use_reentrant=True))

    way = two_layers(forward, normal((B, 5)))
    plain = Written(lambda m, x: m.b(m.a(x).tanh()), a=way.model.a, b=way.model.b)  # type: ignore[union-attr]
    return Way(way.model, way.shards, plain=plain)


def _compiled(part: str) -> Way:
    """Recorded as it was written; the backend needs no compiler."""
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)]
    model, plain = nn.Sequential(*layers), nn.Sequential(*layers)
    if part == "all":
        model.compile(backend="aot_eager")
    else:
        model[0] = torch.compile(model[0], backend="aot_eager")
    return Way(model, normal((7, 5)), plain=plain)


def _slice_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[..., :2] = h[..., 2:] * 3
    return m.b(h).mean(1)


def _made_in_place(m: Any, x: Tensor) -> Tensor:
    made = m.a(m.places)
    made /= 2
    made = F.relu(made, inplace=True)
    return m.b(x.tanh()).tanh() * made.mean((0, 1))


def _used_before_it_is_written(m: Any, x: Tensor) -> Tensor:
    made = m.a(m.places)
    before = x @ made[0]
    made[:, 1:] = made[:, :1] * 2
    made *= 3
    return m.b(x) * made[0, 1] + before


def _by_places(forward: Forward) -> Way:
    parts = {"a": nn.Linear(2, 4), "b": nn.Linear(4, 4), "places": torch.randn(3, 4, 2)}
    return written(forward, normal((6, 4)), **parts)


def _grown(m: Any, x: Tensor) -> Tensor:
    if m.at.shape[0] < x.shape[1]:
        m.at = torch.arange(x.shape[1], dtype=x.dtype)
    return m.a(x + m.at)


def _registered(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "late"):
        m.register_buffer("late", torch.arange(x.shape[1], dtype=x.dtype))
    return m.a(x + m.late)


def _spectral(normed: Callable[[nn.Module], nn.Module]) -> Way:
    model = nn.Sequential(normed(nn.Linear(5, 8).double()), nn.ReLU(), nn.Linear(8, 3))
    return Way(model, normal((6, 5)), None, mode="train")


def _graph(m: Any, nodes: Tensor, edges: Tensor) -> Tensor:
    """Two rounds of messages along edges (2, E) between nodes (N, 4), and their mean."""

    def sent(h: Tensor) -> Tensor:
        return h.index_add(0, edges[1], h[edges[0]])

    return sent(m.second(sent(m.first(nodes)).tanh())).mean(0, keepdim=True)


def _graphs() -> Way:
    edges = {5: [(0, 4), (4, 2), (3, 1)], 3: [(2, 0), (1, 2)], 6: [(5, 0), (3, 4)]}
    shards = [
        {"nodes": torch.randn(n, 4), "edges": torch.tensor(pairs).T} for n, pairs in edges.items()
    ]
    parts = {"first": nn.Linear(4, 5), "second": nn.Linear(5, 2)}
    loops = {f"{name}.{kind}" for name in parts for kind in ("weight", "bias")}
    return written(_graph, shards, **parts, loops=loops, why="a shard is one sample")


ODD: dict[str, Callable[[], Way]] = {
    "a backward pass that looks at numbers": lambda: two_layers(
        lambda m, x: m.b(_Watchful.apply(m.a(x)).tanh()).tanh(), normal((6, 5)), loops=None
    ),
    "categories in a column of floats": lambda: written(
        lambda m, x: m.a(torch.cat([m.e(x[:, 0].long()), x[:, 1:]], 1)),
        [{"0": torch.cat([torch.randint(0, 4, (6, 1)), torch.randn(6, 2)], 1)} for _ in range(8)],
        e=nn.Embedding(4, 3),
        a=nn.Linear(5, 2),
    ),
    "a parameter without entries": lambda: written(
        lambda m, x: m.a(torch.cat([m.tokens.expand(len(x), -1, -1), x[:, None]], 1)).sum(1),
        normal((6, 5)),
        a=nn.Linear(5, 3),
        tokens=nn.Parameter(torch.empty(1, 0, 5)),  # a model's number of register tokens may be 0
        loops=None,
    ),
    **{
        f"an input of {n} rows by chance": lambda n=n: written(
            lambda m, x, shared: m.a(x @ shared.T),
            [{"0": torch.randn(6, 5), "1": torch.randn(n, 5)}],
            a=nn.Linear(n, 3),
        )
        for n in (6, 7)
    },
    "a block without a graph": _reversible,
    "a reentrant checkpoint": _reentrant,
    "a compiled model": lambda: _compiled("all"),
    "a compiled layer": lambda: _compiled("a layer"),
    "relu in place": lambda: two_layers(
        lambda m, x: m.b(F.relu(m.a(x), inplace=True)).mean(1), normal((6, 4, 5))
    ),
    "relu in place in a checkpoint": lambda: two_layers(
        lambda m, x: m.b(
            checkpoint(lambda y: F.relu(m.a(y), inplace=True), x, use_reentrant=False)
        ).mean(1),
        normal((6, 4, 5)),
    ),
    "a slice written in place": lambda: two_layers(_slice_written, normal((6, 4, 5))),
    "parameters alone, written in place": lambda: _by_places(_made_in_place),
    "parameters alone, used and then written": lambda: _by_places(_used_before_it_is_written),
    "an input written in place": lambda: written(
        lambda m, x: m.a(x.sub_(0.5).div_(0.25)), normal((6, 5)), a=nn.Linear(5, 3)
    ),
    "a buffer that grows": lambda: written(
        _grown, normal((6, 5)), a=nn.Linear(5, 3), at=torch.zeros(1)
    ),
    "a buffer registered late": lambda: written(_registered, normal((6, 5)), a=nn.Linear(5, 3)),
    "spectral norm": lambda: _spectral(nn.utils.parametrizations.spectral_norm),
    "classic spectral norm": lambda: _spectral(nn.utils.spectral_norm),
    "graphs, one a shard": _graphs,
}

WAYS: dict[str, Callable[[], Way]] = {
    **dict(_weights()),
    **PRODUCTS,
    **TABLES,
    **SELECTED,
    **NARROW,
    **SEEN,
    **ODD,
}

"""Losses of random operations, as Python source: views, writes, regions without gradients.

A program is drawn line by line. A line is kept if plain torch runs it on the tensors there are, so
every program runs; whether it has a gradient is left to chance. Names: z and y (N, D) of floats,
lab (N,) of classes, msk (N,) of truth values, c1 (D,) and c2 (D, D) closure tensors.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

D = 3
KINDS = "fibs"  # floats, integers, truth values, sizes

EXPRESSIONS = {
    "f": """
        {f} + {f} ; {f} * {f} ; 2 - {f} ; {f} + {i} ; {f} * {b} ; {f} ** 2 ; {f} / {s} ; {f} % 0.6 ;
        {f} // 0.7 ; 1.5 / ({f}.abs() + 1) ; {f} @ {f}.T ; c2 @ {f}.T ; {f}.T @ {f} ;
        torch.einsum('ij,kj->ik', {f}, {f}) ; torch.einsum('...j,j', {f}, c1) ; {f}.T ; {f}.mT ;
        {f}.real ; {f}[0] ; {f}[:, 0] ; {f}[1:] ; {f}[..., 1:] ; {f}[:, None] ; {f}[::2] ;
        {f}[{i}] ;
        {f}[{b}] ; {f}[:, [2, 0]] ; {f}[{f} > 0] ; {f}[torch.arange({s}), lab] ; {f}[{s} // 2:] ;
        {f}[torch.where({f} > 0)] ; {f}.sum(0) ; {f}.mean(-1, keepdim=True) ; {f}.std(0) ;
        {f}.max(1).values ; {f}.min(0)[0] ; {f}.logsumexp(-1) ; {f}.norm(dim=-1) ; {f}.cumsum(0) ;
        {f}.sort(0).values ; {f}.topk(2).values ; {f}.median(0)[0] ; torch.std_mean({f}, 0)[1] ;
        {f}.quantile(0.3) ; {f}.prod(-1) ; {f}.diff(dim=0) ; {f}.exp().clamp(max=9) ; {f}.tanh() ;
        {f}.softmax(-1) ; F.log_softmax({f}, dim=-1) ; F.normalize({f}) ; F.gelu({f}) ;
        F.layer_norm({f}, {f}.shape[1:], c1) ; torch.where({f} > 0, {f}, 0.1) ; {f}.sign() ;
        torch.where({b}, {f}, {f}) ; torch.maximum({f}, {f}) ; {f}.reshape(-1) ; {f}.view({s}, -1) ;
        {f}.unsqueeze(1).expand(-1, 2, -1) ; {f}.flip(0) ; {f}.roll(1, 0) ; torch.cat([{f}, {f}]) ;
        torch.stack(({f}, {f}), dim=1) ; {f}.chunk(2)[0] ; {f}.unbind(0)[1] ; {f}.diagonal() ;
        {f}.tril() ; {f}.unfold(0, 2, 1) ; {f}.gather(0, {f}.argsort(0)) ;
        {f}.index_select(0, {i}) ;
        {f}.masked_fill({f} > 0, -1.0) ; {f}.masked_select({b}) ;
        {f}.scatter(1, {i}[:, None], 0.5) ;
        torch.zeros(D, {f}.shape[-1], dtype={f}.dtype).index_add(0, {i}, {f}) ;
        F.embedding({i}, c2) ;
        {f}.index_put((torch.tensor([2, 0]),), c1) ; {f}.float() ; {f}.double() ; {f}.bfloat16() ;
        {i} / 2 ; {i}.to({f}.dtype) ; {b} * 1.0 ; {f}.detach() ; {f}.clone() ; {f} * {f}.dim() ;
        torch.tensor([0.1, 2, 3], dtype={f}.dtype) ; {f}.new_full(({s},), 0.7) ;
        torch.eye(3) * {f} ;
        torch.ones({s}, 3, dtype={f}.dtype) * {f} ; torch.arange({s}) * 0.1 ; {f} / math.sqrt({s}) ;
        torch.finfo({f}.dtype).eps * {f} ; ({f} * 1j + 1).abs() ; torch.fft.rfft({f}).real ;
        F.mse_loss({f}, {f}, reduction='none') ; F.smooth_l1_loss({f}, {f}, beta=0.4) ;
        F.cross_entropy({f}, lab, weight=c1.abs(), label_smoothing=0.1, ignore_index=1) ;
        F.binary_cross_entropy_with_logits({f}, {f}.sigmoid(), pos_weight=c1.exp()) ;
        F.kl_div(F.log_softmax({f}, 1), F.softmax({f}, 1), reduction='batchmean') ;
        F.triplet_margin_loss({f}, {f} + 1, {f} * 2, margin=0.3, swap=True) ;
        F.gaussian_nll_loss({f}, {f} * 2, {f}.abs() + 0.5, full=True) ; F.one_hot(lab, 3) * {f}
    """,
    "i": """
        {f}.argmax(-1) ; {f}.topk(2).indices ; {i} + 1 ; {i} % 3 ; torch.arange({s}) ; {b}.long() ;
        ({f} > 0).sum(-1) ; {i}[{b}] ; lab ; torch.tensor([0, 2, 1]) ; {i} // 2 ; {i} << 1 ;
        {i} ^ 3 ;
        torch.unique({i}, return_inverse=True)[1] ; {s} - {i} ; lab.to(torch.uint8)
    """,
    "b": """
        {f} > 0 ; {i} == {i} ; lab[:, None] == lab ; ~{b} ; {b} & {b} ; msk ; {f}.isfinite() ;
        torch.eye({s}, dtype=torch.bool) ; {b}[:2] ; {i} > 1 ; torch.logical_and({b}, {f} > 0)
    """,
    "s": "{f}.shape[0] ; {f}.size(-1) ; {s} + 1 ; {s} // 2 ; {f}.ndim ; {f}.shape[1:].numel() ; 3",
}
STATEMENTS = """
    {f} += 1 ; {f} += {f} ; {f} *= {f} ; {f} /= 2 ; {f} **= 2 ; {f} //= 2 ; {f} @= c2 ;
    {f}.mul_(0.5) ;
    {f}.clamp_(min=0) ; {f}.masked_fill_({f} > 0.3, 0.1) ; {f}.zero_() ; {f}.fill_({f}.sum()) ;
    {f}.copy_({f}) ; {f}.fill_diagonal_(0) ; {f}.exp_() ; {f}.div_({s}) ; {f}[0] = 0.5 ;
    {f}[1] = {f}[0] ; {f}[:, 0] = {f}[:, 1] ; {f}[{b}] = 0.7 ; {f}[{b}] *= 2 ; {f}[{i}] = 1.0 ;
    {f}[1:] += {f}[:-1] ; {f}[..., 0] *= {f}[..., 1] ; {f}.T[0] = 1.5 ; {f}.mT.mul_(2) ;
    {f}.view(-1)[:2].add_(1) ; {f}.diagonal().copy_(c1) ; {f}.index_add_(0, {i}, {f}) ;
    {f}.scatter_(1, {i}[:, None], 0.5) ; {f}.detach().mul_(2) ; F.relu({f}, inplace=True) ;
    F.leaky_relu({f}, 0.2, True) ; {i} += 1 ; {i}[0] = 2 ; {i} <<= 1 ; {i} >>= 1 ; {i} &= 3 ;
    {b}[0] = True ; {b} ^= {b} ; {b}.logical_not_() ; c1.add_({f}.detach().mean()) ; c1.mul_(0.5) ;
    c2[0] = {f}.mean() ; c2.T.add_(1) ; y[0] = {f}.sum() ; {f}.real.mul_(2) ; assert {f}.dim() > 0
"""
REGIONS = (
    "with torch.no_grad():",
    "with torch.enable_grad():",
    "with torch.set_grad_enabled(False):",
)


def parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


def tensors(num: int, seed: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Draw the arguments, of which z and y are leaves, and the closure tensors."""
    numbers = torch.Generator().manual_seed(seed)
    z, y = (torch.randn(num, D, generator=numbers, dtype=torch.float64).to(dtype) for _ in "zy")
    arguments = {
        "z": z.requires_grad_(),
        "y": y.requires_grad_(),
        "lab": torch.randint(0, D, (num,), generator=numbers),
        "msk": torch.randint(0, 2, (num,), generator=numbers).bool(),
    }
    constants = {
        "c1": torch.linspace(-1, 1, D, dtype=dtype),
        "c2": torch.eye(D, dtype=dtype) + 0.1,
    }
    return arguments, constants


def function_of(source: str, constants: dict[str, Tensor]) -> Callable[..., Tensor]:
    """Return the function that a program defines, closed over these tensors."""
    names: dict[str, Any] = {"torch": torch, "F": F, "math": math, "D": D, **constants}
    exec(compile(source, "drawn_program.py", "exec"), names)
    found: Callable[..., Tensor] = names["loss"]
    return found


class Program:
    """A program that is being drawn; `source` is the function's."""

    def __init__(self, seed: int) -> None:
        self._of = random.Random(seed)
        arguments, constants = tensors(5, seed, torch.float64)
        self._values: dict[str, Any] = {"torch": torch, "F": F, "math": math, "D": D, **constants}
        floats = {name: arguments[name] * 1 for name in "zy"}
        self._values |= {**arguments, **floats}
        self._names = {"f": ["z", "z", "y"], "i": ["lab"], "b": ["msk"], "s": ["z.shape[0]", "3"]}
        self._lines: list[str] = []
        for _ in range(self._of.randint(4, 12)):
            self._region() if self._of.random() < 0.15 else self._line("")
        used = dict.fromkeys([*self._names["f"][-5:], "z"])
        terms = [f"({name} * {self._of.choice(['1', '-1', name])}).sum()" for name in used]
        self._lines.append(f"return {' + '.join(terms)}")
        body = "\n".join(f"    {line}" for line in self._lines)
        self.source = f"def loss(z, y, lab, msk):\n{body}\n"

    def _region(self) -> None:
        region, num = self._of.choice(REGIONS), len(self._lines)
        with torch.set_grad_enabled("enable" in region):
            for _ in range(self._of.randint(1, 3)):
                self._line("    ")
        if len(self._lines) > num:
            self._lines.insert(num, region)

    def _line(self, indent: str) -> None:
        for _ in range(20):
            if self._of.random() < 0.3:
                line = self._filled(self._of.choice(parts(STATEMENTS)))
                if self._runs(line):
                    self._lines.append(indent + line)
                    return
            elif self._assigned(indent):
                return

    def _assigned(self, indent: str) -> bool:
        kind = self._of.choices(KINDS, [12, 2, 2, 1])[0]
        name = f"v{len(self._lines)}"
        line = f"{name} = {self._filled(self._of.choice(parts(EXPRESSIONS[kind])))}"
        if not self._runs(line) or not self._fits(self._values[name], kind):
            return False
        self._names[kind].append(name)
        self._lines.append(indent + line)
        return True

    def _filled(self, template: str) -> str:
        """Put names of the kinds that a template asks for in their places, recent ones first."""
        return re.sub(r"\{(\w)\}", lambda of: self._of.choice(self._names[of[1]][-5:]), template)

    def _runs(self, line: str) -> bool:
        try:
            exec(line, self._values)
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError):
            return False
        return True

    def _fits(self, value: Any, kind: str) -> bool:
        if not isinstance(value, Tensor):
            return kind == "s" and 0 < value < 12
        kinds = {"f": value.is_floating_point(), "b": value.dtype == torch.bool}
        return 0 < value.numel() < 4000 and kinds.get(kind, not any(kinds.values()))

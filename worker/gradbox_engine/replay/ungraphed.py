"""Shards whose first pass may go without a graph.

A graph that is not kept still costs its nodes: 2 to 3 % of a forward pass of 30 ms on a CPU.
Without one torch may take other kernels, as it does for an LSTM, which round otherwise; then what a
job returns would depend on how much it could keep. So a shard of each form that comes again, in a
long job or in a later one, goes through both ways, once for a model. Where z and the buffers are
the same to the last bit, and the job with its replay ends well, later jobs leave the graph out.

A model may keep something from one call to the next: weights that it fuses in its first call, say.
Made without a graph, that would cut the way back of every later call. So a model that binds any
attribute anew while shards go without graphs is given graphs again, for good, and so is one whose
replay differs in a bit. That the job ends well matters for the same reason: what is kept with its
graph fails there, where that graph saved tensors.

Not noticed: something kept inside of plain objects or outside of the model, made for the first time
in a shard without a graph, of a form that has been seen before. And z of a shard that needs no
replay is not looked at again: should its data take another branch of the model than the trial's, it
may be rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from gradbox_engine.replay.retention import MOST_KNOWN, Form, forget_oldest

WORTHWHILE = 16
"""A trial is one more forward pass. So many shards have to come, or another job of that form."""

Known = dict[Hashable, bool | None]
"""By setting and form, whether the bits are the same; None where nobody has tried."""

_known_by_model: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()
_refuted: WeakSet[nn.Module] = WeakSet()


class GraphMissed(Exception):
    """A shard failed without a graph, or did not do the same as with one."""


def refute(model: nn.Module) -> None:
    """Let this and later jobs know: the model's shards have to have graphs."""
    _refuted.add(model)


class Ungraphed:
    """What is known of a model's shards in one setting, and what a job finds out."""

    def __init__(self, model: nn.Module, setting: Hashable) -> None:
        """Look up what earlier jobs found out.

        Args:
            setting: everything beside a shard's form that kernels may depend on.
        """
        self._setting = setting
        self._refuted = model in _refuted
        self._known = _known_by_model.setdefault(model, {})
        self._found: Known = {}

    def allowed(self, form: Form | None) -> bool:
        """Return whether a shard of this form is known to give the same bits without a graph."""
        return not self._refuted and self._known.get((self._setting, form)) is True

    def to_be_tried(self, form: Form, num_left: int) -> bool:
        """Return whether to try with this shard, and take note that its form came.

        Args:
            num_left: how many shards are to come with this one.
        """
        if self._refuted:
            return False
        key = (self._setting, form)
        if self._found.get(key, self._known.get(key)) is not None:
            return False
        came_here = key in self._found
        self._found[key] = None
        return key in self._known or (came_here and num_left >= WORTHWHILE)

    def tried(self, form: Form, *, same: bool) -> None:
        """Take note of a trial, for when the job has ended well."""
        self._found[self._setting, form] = same

    def confirm(self) -> None:
        """Let later jobs know: this one's replays did repeat the first pass."""
        self._known.update(self._found)
        forget_oldest(self._known, MOST_KNOWN)

"""The rules a factored result may name, in one place: what a reader of the wire format needs."""

from __future__ import annotations

from gradbox_factors.block import Block, Positions, Total, Zero
from gradbox_factors.convolution import Convolution
from gradbox_factors.lookup import Lookup
from gradbox_factors.outer import Outer
from gradbox_factors.term import Term

TERMS: dict[str, type[Term]] = {
    term.rule: term for term in (Outer, Lookup, Positions, Convolution, Block, Zero, Total)
}

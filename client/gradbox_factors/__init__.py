"""Per-sample gradients and Jacobians as factors: the one algebra that box and laptop share.

It needs torch and nothing else of gradbox, so the engine and the client both import it.

Read `term` first, then the kinds of terms: `outer`, `lookup`, `convolution`, `block`, and `total`,
a sum of several. `factored` is a whole Jacobian of them, `gram` what two of them make; `hashing`,
`dense_projection` and `two_sided` project, `multiplications` chooses the cheaper of two ways to a
number, `slabs` cuts what is made at a time, `sums` adds over parameters, `packed` is the form in a
file.
"""

from gradbox_factors.block import Block, Positions, Zero
from gradbox_factors.convolution import Convolution, Geometry
from gradbox_factors.dense_projection import (
    DenseProjection,
    Kind,
    Projection,
    projected_rows,
    projection_of,
    relative_error,
)
from gradbox_factors.factored import Factored, squared_norms
from gradbox_factors.hashing import Sketch
from gradbox_factors.lookup import Lookup
from gradbox_factors.outer import Outer
from gradbox_factors.packed import packed, unpacked
from gradbox_factors.term import Term
from gradbox_factors.total import TERMS, Total
from gradbox_factors.two_sided import TwoSided

__all__ = [
    "TERMS",
    "Block",
    "Convolution",
    "DenseProjection",
    "Factored",
    "Geometry",
    "Kind",
    "Lookup",
    "Outer",
    "Positions",
    "Projection",
    "Sketch",
    "Term",
    "Total",
    "TwoSided",
    "Zero",
    "packed",
    "projected_rows",
    "projection_of",
    "relative_error",
    "squared_norms",
    "unpacked",
]

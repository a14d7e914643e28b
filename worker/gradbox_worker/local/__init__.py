"""Jobs without a box: what `GradClient.local` computes by, in the client's own process.

`box` takes a job from the client to its result: it is checked by what a service checks it by,
executed by what a device executes it by, and no file, Redis or other process has a part in it.
`models` are what it runs on, live modules or those of a models file, and `earlier` what is kept of
jobs that others go on from. The client finds `LocalBox` by this package's name.
"""

from gradbox_worker.local.box import LocalBox

__all__ = ["LocalBox"]

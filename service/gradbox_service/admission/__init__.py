"""Checks a posted job against the box before it is accepted.

What can be known without torch is known here, at once, rather than minutes later in a queue: the
model and its version, entry points and argument names, blobs and the tensors in them, graphs,
names of parameters. Shapes and values are the worker's to judge.
"""

from gradbox_service.admission.admit import admit

__all__ = ["admit"]

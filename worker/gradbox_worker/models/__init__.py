"""The registered models: the file that names them, how each is built, and which stay loaded.

`models_file` and the names exported here need no torch, so that the worker's parent process can
read the file; `builders`, `version` and `registry` do.
"""

from gradbox_worker.models.models_file import Builder, ModelEntry, read_models_file

__all__ = ["Builder", "ModelEntry", "read_models_file"]

"""The registered models: the file that names them, how each is built, and which stay loaded.

`models_file` and the names exported here need no torch, so that the worker's parent process can
read the file; `builders`, `version` and `registry` do.

Read `models_file`, `builders` (with `hugging_face`, `spread`, `packages` and `weight_index`),
`version`, `registry`; then `describe` and `example`, what users are told of a model, and
`failures`, what its owner is. `command` is `gradbox models`, with `register` and `verify`;
`shipping` sends files to the machines of a cluster.
"""

from gradbox_worker.models.models_file import Builder, ModelEntry, read_models_file

__all__ = ["Builder", "ModelEntry", "read_models_file"]

"""Tensors and their bytes; torch is only used where a tensor is a torch one.

Read `tensor_bytes` first: one tensor as safetensors describes it. `blob` is a whole file of them,
to be uploaded; `safetensors_header` reads a file's header and refuses what is not exactly one,
`checksums` tells whether a result is as it was written (the service and the worker use both too);
`lazy_tensor` is a tensor that is fetched as it is indexed.
"""

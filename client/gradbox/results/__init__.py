"""A job's result: a safetensors file, read lazily.

Read `result` first: `GradResult`, which users get. Its tensors are read from a file on this machine
or from what came with the job (`result_files`), or from a file on the box (`remote_file`);
`row_reductions` are norms, Gram, J v and Jᵀ u of per-sample results; `factors` reads what comes as
factors and trusts none of it; `plot` draws them.
"""

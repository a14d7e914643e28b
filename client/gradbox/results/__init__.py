"""A job's result: a safetensors file, read lazily.

Read `result` first: `GradResult`, which users get. Its tensors are read from a file on this machine
(`result_files`), from one on the box (`remote_file`), or came with the job (`held_file`), and
`rounded_tensors` widens what came in 16 bits; `row_reductions` are norms, Gram, J v and Jᵀ u of
per-sample results, `reduction_arguments` what they are given; `factor_metadata` and `factor_checks`
read what comes as factors and trust none of it; `grad_accumulation` adds gradients into `.grad`,
`plot` draws them.
"""

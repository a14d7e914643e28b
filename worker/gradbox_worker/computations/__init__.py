"""One job on the device: from its spec to its result file.

Read `execution` first, then `job`, which is what each computation is handed and hands back, and
`engine_inputs`. Then one module a computation: `gradient`, `cotangents`, `forward`, `per_sample`
with `factors` and `dense_rows`, `mixed_gradient`, `curvature`, `step`, a gradient that ends in a
run's update, `state`, which is of jobs on a run's state, and `stores`, of jobs on a gradient store;
they name what the engine returns by `sections`.
`estimate` says what a job would take, by the few shards of `sampled`.
Which devices run the ranges of a job is `leading`'s to say, and `held_jobs` have it ready on each.
`kept_graphs` holds graphs between two jobs, with their `strides`; `checkpoints` hold the state of a
long one. `receipts` says what a job was and how it went, with its `identity`. `placement`, `memory`
and `memory_limit` know the device, `phases` times a job for those who trace it.
"""

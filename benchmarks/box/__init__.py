"""What a person waits for around the computation, on a box that `gradbox up` starts.

`service`, `small_jobs`, `training_runs`, `training_step`, `large_results`, `queue` and
`remote_autograd` are a benchmark each, and so is `local`, which has no box. `day` is that of ten
people: `day_jobs` sends what `day_mix.csv` says, `fair_share` tells what is fair.
"""

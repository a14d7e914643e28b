"""Plans: where a model's samples are, and how each use of a parameter is treated.

Read `model` (set up, called, put back), `probe_runs` (where the samples are), `plan` and
`probed_use` (a step for each use), `coupling` (where samples meet), `verify` (rows against autograd).
"""

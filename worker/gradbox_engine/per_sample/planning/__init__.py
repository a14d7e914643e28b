"""Plans: where a model's samples are, and how each use of a parameter is treated.

Read `model` (set up, called, put back), `probe_runs` (where the samples are), `plan` (a step for
each use), `probed_use` (how it is chosen), `unseen_uses` (what no function call shows), `coupling`
(where samples meet), `verify` (rows against autograd).
"""

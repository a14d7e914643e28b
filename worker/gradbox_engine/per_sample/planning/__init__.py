"""Plans: where a model's samples are, and how each use of a parameter is treated.

Read `model` (set up, called, put back), `probe_runs` (where the samples are, and where they meet),
`plan` (a step for each use), `probed_use` (how it is chosen), `verify` (rows against autograd).
"""

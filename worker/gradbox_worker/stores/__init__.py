"""Rows that a store keeps: read in blocks, compared with rows of a job.

`rows` reads a store's parts as one matrix in blocks; `curvature` is applied to queries, of which
`scoring` makes the scores.
"""

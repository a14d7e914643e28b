"""Rows that a store keeps: read in blocks, compared with rows of a job.

`rows` reads a store's parts as one matrix in blocks; `scoring` makes the scores of queries.
"""

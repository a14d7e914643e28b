"""Rows for every sample: `times` of the engine beside `peers` on `workloads`; `report` has bars.

`calls` measures the public calls of two source trees in turn, `jobs` from submit to result.
"""

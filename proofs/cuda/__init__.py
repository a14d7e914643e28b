"""What only a CUDA device can show; all is skipped without GRADBOX_TEST_DEVICE=cuda.

`test_streams` (copies beside kernels, no waits, random streams), `test_out_of_memory`,
`test_retention`, `test_numerics` (attention's kernels, precisions, equal bits), and
`test_device_process` (a worker whose device fails). `python -m proofs.cuda` runs these, the tests
that take their device from `tests.device`, and the benchmarks, in the order of `plan`, and writes
one report.
"""

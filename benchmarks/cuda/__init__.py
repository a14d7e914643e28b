"""The benchmarks of a GPU: `python -m benchmarks cuda`, in parts that run one by one.

Order to read: `clock` (events, ceilings, peaks by the allocator), `models` (what is computed, with
random weights, for a bare machine has no others), `sizes`, then the parts: `replay` (the engine
over its kernels, peers, retention), `per_sample`, `decoder`, `mixed`, `upload`, `graphs`,
`service`. Every part also runs on a CPU, at small sizes with `--dry`, so that half an hour of a GPU
meets no line that never ran.
"""

"""The tensors of blobs, and the result of a job: files on the box's disk, or memory.

`blob_tensors` reads inputs, a shard at a time. `result_file` writes a result that is in memory;
`result_in_place` lays out one that is larger, and `placed_rows` fills it piece by piece;
`result_in_memory` is that of a job without a box. `earlier_result` reads that of the job that
another goes on from. `rounded_gradients` makes them smaller for the wire. `safetensors_types` has
the names of dtypes.
"""

"""Files on the box's disk: the tensors of uploaded blobs, and the result of a job.

`blob_tensors` reads inputs, a shard at a time. `result_file` writes a result that is in memory;
`result_in_place` lays out one that is larger, and `placed_rows` fills it piece by piece.
`rounded_gradients` makes them smaller for the wire. `safetensors_types` has the names of dtypes.
"""

"""What a user hands in, cut into shards and then into blobs.

Read `shards` first: the forms in which `inputs=` may be given, read into groups of named shards.
`packing` makes shards of about equal cost from samples of different lengths; it is public as
`gradbox.pack`. `uploads` pools tensors into blobs and gives the references that a spec makes; it
knows what a client has sent before.
"""

"""What passes between coordinator, head and actors; nothing of it is a pickled tensor.

array_buffers       tensors as NumPy buffers; `factor_buffers`, rows in their factored form
sent_tensors        what an actor is sent of a job
messages            what a device says that runs a whole job
shipped_models      builder code and weights, for machines that do not have them
"""

"""Checks a posted job against the box, and queues it.

What can be known without torch is known here, at once, rather than minutes later in a queue: the
model and its version, entry points and argument names, blobs and the tensors in them, graphs,
names of parameters, and what one user may ask of a box that others share. Shapes and values are the
worker's to judge. Nothing here knows HTTP. What is checked of a job against its model alone
(`admit.check_fit`, `estimate.may_be_estimated`, `earlier_job`, `forward_job`) is checked without a
box, too, by `gradbox_worker.local`.

To read in this order:

    posting                  the way of a body to a queued job, and of the blobs in it
    stores                   gradient stores, the rows appended to them, and queries
    training                 runs, their steps, and the jobs that save a state or answer with one
    limits, quota            what one user may ask for, and have; what would be more than fits
    admit                    the checks of all computations, and each one's own
    model, tensors           what a spec names, found on this box, and do the shards fit the model
    parameters, functions    do names in `wrt` and `weights`, and graphs
    gradient, per_sample, mixed_gradient    what one computation alone has to fulfil
    run_state                which weights a job on those of a run has
    estimate                 what was measured of a job's like, and does that fit the box
    earlier_job              a job that this one reads: the rows of `against`, for one
    forward_job              cotangents, and the job whose outputs they belong to
"""

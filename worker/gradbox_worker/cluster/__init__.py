"""One job over many devices and many machines, on Ray; no other room imports it.

`gradbox up --cluster` runs `python -m gradbox_worker.cluster`, the head of the cluster: it starts
Ray or joins it, has one actor for every device, and ends all of it. The device process of a worker
becomes a coordinator: it leases actors, and either has one run a whole job, or has each run a range
of the job's shards and puts the parts together. The mathematics of that is `gradbox_engine.ranges`.

    coordinator    in a worker: which devices run a job, its ranges, its result
    head           beside the service: Ray, the actors, the pool that lends them
    actor          on a device: a whole job, or what is held of a wide one
    exchange       what passes between them: tensors and models

Read `actor.cluster_device`, then `coordinator.wide_job`.
"""

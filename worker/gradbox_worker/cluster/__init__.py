"""One job over many devices and many machines, on Ray; no other room imports it.

`gradbox up --cluster` runs `python -m gradbox_worker.cluster`, the head of the cluster: it starts
Ray or joins it, has one actor for every device, and ends all of it. The device process of a worker
becomes a coordinator: it leases actors, and either has one run a whole job, or has each run a range
of the job's shards and puts the parts together.

    ray_session       Ray started on this machine, or joined; what it is told by its environment
    head, __main__    the process that owns the actors and the pool
    address_file      how coordinators reach the head's cluster
    leases, pool      which device runs for whom
    device_actor      a device as an actor; `cluster_device`, which it calls: a warm device
                      (`device.warm_device`), and what it holds of wide jobs
    sent_tensors      what an actor is sent of a job
    open_job          what an actor holds of a job between its first pass and its replay
    range_checkpoints what it writes of that, and of samples, for another attempt
    open_samples      a per-sample job on an actor; `row_outlet`, its dense rows on their way out
    array_buffers     tensors as NumPy buffers, on their way between processes; `factor_buffers`
    main, serving     the coordinator: the entry point, and its loop
    joined            the cluster as a coordinator sees it
    waiting_graphs    where graphs of a forward job wait for the gradient job that a coordinator has
    whole_job         a job that one device runs
    wide_job          a job that several run: `wide_computations` in two phases, `wide_samples`
    leased_devices    the devices of one such job; `ray_devices` and `ray_sample_devices` are what
                      the engine sees of them
"""

"""Jobs over many devices and many machines, on Ray; no other room imports it.

`gradbox up --cluster` runs `python -m gradbox_worker.cluster`, the head of the cluster: it starts
Ray or joins it, has one actor for every device, and takes the turns for all of them. A turn names
the devices of its job; the first runs it as a single device does, and leads the others. The
mathematics of that is `gradbox_engine.ranges`.

The head, which has no torch:

    ray_session      Ray started on this machine, or joined
    machines         which devices a machine has, and whether they are alike
    head             the devices: their processes, and which of them run a job
    taking, turn     the main loop; one job on the devices that it was given
    shipping         files for machines that do not see the box's, and results from there

A device:

    device_actor     a device as an actor of Ray; `messages`, what it says to the head
    device           which it calls: a warm device, and the ranges of jobs that others lead
    held_ranges      the ranges that it has, from one call to the next
    rows             dense rows on their way to the leader, which writes them
    buffers          tensors between devices

Its part as a leader:

    leading          the ranges of a job, and what its receipt says of them
    led_devices      its devices as the engine sees them
    helpers          the other devices: which range is where, and what a lost one is replaced by

Read `taking`, then `turn`, then `leading`.
"""

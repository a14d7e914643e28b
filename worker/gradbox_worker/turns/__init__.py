"""Turns: how a job comes to this worker's device, and what becomes of the job's record.

Read `turn` first: one attempt from queued to its end. `serving` is the loop of the device process,
which takes one turn after the other; `main` is where that process begins. `worker` is the other
process, which watches it; `supervision` has what both do for the attempt that runs, and `presence`
is the worker's name and what it announces. Only `serving` needs torch.
"""

"""Turns: what brings a job to this worker's device, and what becomes of the job's record.

Read `turn` first: one attempt from queued to its end, whoever brings it. `supervision` watches the
attempt meanwhile; `presence` is the worker's name and what it announces. `rq_worker` takes turns
off RQ, with the bookkeeping of `rq_bookkeeping`, and has a device process; `inline` is its
in-process twin. Only `inline` needs torch.
"""

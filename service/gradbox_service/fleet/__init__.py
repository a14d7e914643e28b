"""The workers of a box, and whether they are handed jobs.

To read in this order:

    workers      who lives, what each does, and the models they announce
    operation    whether jobs are handed out and taken: running, paused, draining
"""

from gradbox_service.fleet.workers import Fleet, WorkerPresence

__all__ = ["Fleet", "WorkerPresence"]

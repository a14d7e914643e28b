"""The workers of a box, and whether they are handed jobs.

To read in this order:

    operation    whether jobs are handed out and taken: running, paused, draining
    workers      who lives, what each does, and the models they announce
"""

from gradbox_service.fleet.workers import Fleet, Standing, WorkerPresence

__all__ = ["Fleet", "Standing", "WorkerPresence"]

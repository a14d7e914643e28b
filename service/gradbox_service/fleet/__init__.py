"""The workers of a box, and whether they are handed jobs.

workers      who lives, what each does, and the models they announce
operation    whether jobs are handed out and taken: running, paused, draining
"""

from gradbox_service.fleet.workers import Fleet, MemoryFleet, RedisFleet, WorkerPresence

__all__ = ["Fleet", "MemoryFleet", "RedisFleet", "WorkerPresence"]

"""What runs on a device of the cluster.

device_actor        a device as an actor of Ray
cluster_device      which it calls: a warm device (`device.warm_device`), and what it holds of
                    wide jobs
open_job            of a job between its first pass and its replay
open_samples        of a per-sample job; `row_outlet`, its dense rows on their way out
range_checkpoints   what it writes of either, for another attempt
"""

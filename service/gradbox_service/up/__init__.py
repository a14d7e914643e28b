"""`gradbox up`: one box on one machine, started, supervised and stopped in order.

To read in this order:

    background          `--wait`: the same in another process
    box                 the whole: Redis, service, workers; what restarts them
    saying              what it says of itself
    credentials         the owner's token, and client.toml while the box is ready
    reached             how others reach it
    script              `--exec`: what runs while the box is up
    cluster             `--cluster`: the head of a cluster of devices
    drain               when a box that drains has nothing left to do
    data_folder         the folder that one `gradbox up` at a time may have
    part, lifeline      one child process with its log; how it ends with its parent
    watchdog            which part hangs
    embedded_redis      the server that `up` brings
    append_only_file    how its file is mended after a power cut
    devices             which devices there are, without torch
"""

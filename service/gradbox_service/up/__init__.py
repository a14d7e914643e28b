"""`gradbox up`: one box on one machine, started, supervised and stopped in order.

To read in this order:

    box               the whole: Redis, service, workers; what restarts them
    background        `--wait`: the same in another process
    console           what it says of itself, and how others reach it
    data_folder       its lock, the owner's token, and client.toml while the box is ready
    devices           which devices there are, of this machine or of a cluster
    processes         child processes with their logs, and the script of `--exec`
    watchdog          which of them hangs, and when a box that drains has nothing left to do
    embedded_redis    the server that `up` brings, and how its file is mended after a power cut
"""

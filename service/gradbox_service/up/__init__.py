"""`gradbox up`: one box on one machine, started, supervised and stopped in order.

To read in this order:

    command             what is given on the command line
    box                 the whole: Redis, service, workers; what restarts them
    part, lifeline      one child process with its log; how it ends with its parent
    watchdog            which part hangs
    embedded_redis      the server that `up` brings
    append_only_file    how its file is mended after a power cut
    devices             which devices there are, without torch
"""

"""Which queued job runs next, and what becomes of a job that no worker holds.

To read in this order:

    order         priority, then fair shares between owners, then age
    dispatch      feeds turns from the records, and puts back what a lost worker held
    leadership    the lock of the one service process that does so
"""

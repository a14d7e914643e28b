"""Which queued job runs next, and what becomes of a job that no worker holds.

To read in this order:

    shares        device seconds that each owner used, recent ones weighing more
    waiting       queued jobs in their order: priority, then shares, then age
    active_jobs   the queued and running jobs in memory, fed by the stream of changes
    passed_changes    the changes that the process's one reader of the stream has read
    places        where those stand who are told, for whom they wait and about how long
    dispatch      feeds turns from them, and puts back what a lost worker held
    leadership    the lock of the one service process that does so
"""

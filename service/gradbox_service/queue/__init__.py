"""Which queued job runs next, and what becomes of a job that no worker holds.

To read in this order:

    shares         device seconds that each owner used, recent ones weighing more
    waiting        queued jobs in their order: priority, then use, then age
    active_jobs    the queued and running jobs in memory: which of them wait, are handed out, run
    following      keeps them up to date by the stream of changes
    short_list     the turns in RQ's list: which job gets the next, and which turns were lost
    positions      of queued jobs: for whom they wait, about how long
    dispatch       feeds turns, and puts back what a lost worker held
"""

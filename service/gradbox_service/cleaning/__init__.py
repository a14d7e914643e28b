"""Removes results, blobs and job records that nobody needs any more.

To read in this order:

    expiry     what goes by age and room, least recently used first; touches no disk
    spent      what goes first: what only jobs needed that are done
    crowding   whose records go before their time, so that Redis has room for new jobs
    removed    what somebody removed by hand
    needed     what jobs read
    under_way  jobs that are being posted: what they name is not needed yet
    cleaner    does it once a minute, in the service process that leads, and at once for a quota

`gradbox storage`, which lists and cleans by hand, is `gradbox_service.commands.storage`.
"""

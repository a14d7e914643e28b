"""Removes results, blobs and job records that nobody needs any more.

To read in this order:

    expiry     what goes by age, quota and room, least recently used first; touches no disk
    crowding   whose records go before their time, so that Redis has room for new jobs
    removed    what somebody removed by hand
    needed     what jobs that have not ended still read
    cleaner    does it once a minute, in the service process that leads

`gradbox storage`, which lists and cleans by hand, is `gradbox_service.storage_command`.
"""

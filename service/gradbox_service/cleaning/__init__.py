"""Removes results, blobs and job records that nobody needs any more.

To read in this order:

    expiry       what goes by age and room, least recently used first, and whose records
    needed       what jobs read, and what only jobs needed that have ended: that goes first
    under_way    jobs that are being posted: what they name is not needed yet
    removed      what somebody removed by hand
    cleaner      does it once a minute, in the service process that leads, and at once for a quota

`gradbox storage`, which lists and cleans by hand, is `gradbox_service.commands.storage`.
"""

"""Removes results, blobs and job records that nobody needs any more.

Read in this order: `expiry` chooses by age, quota and room, least recently used first; `needed`
tells what waiting and running jobs still read; `cleaner` does it once a minute in the service that
leads; `command` is `gradbox storage`, which lists and cleans by hand.
"""

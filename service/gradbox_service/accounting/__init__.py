"""What each owner used of a box, and which blobs are theirs.

To read in this order:

    usage          device seconds, bytes of results and jobs by the hour; minutes of each worker
    blob_owners    who has sent which blob, which counts against each of them
"""

"""The service: HTTP and job records. It never imports torch.

A job is submitted, admitted, handed out and computed:

    http         takes it from a client, and answers
    admission    checks it against the box, and queues it as one of the records in `jobs`
    queue        hands it to a worker when it is its owner's turn
    jobs         records, events and turns, which service and worker share; the worker computes

What that stands on:

    runs          training on the box: which steps were made, and where states are
    fleet         the workers, the models they offer, and whether they are handed jobs
    accounting    what each owner used, and which blobs are theirs
    identity      who may use the box: tokens, sessions
    store         blobs and results on the disk; cleaning removes what nobody needs any more
    database      how Redis is reached

Around it, `dashboard` and `watching` show a box to its users and its owner, `up` runs a whole box,
and `commands` is the service's part of the command line. Beside the rooms are `settings`, `backing`
(all that a service stands on) and `repeating_thread` (what the dispatcher and the cleaner are).
"""

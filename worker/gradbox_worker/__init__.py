"""The worker: takes jobs off the queue and runs them on one device of this machine.

    demo/           `gradbox demo`
    cluster/        one job on many devices of a Ray cluster
    turns/          one turn of RQ is one attempt at a job: its record, lease, time limit, outcome
    device/         the warm process that keeps the models, as its parent sees it and from inside
    local/          jobs in the client's own process, without a box
    computations/   one job: its spec read, the engine called, the result and receipt written
    runs/           states of runs that train, in memory and on disk, and their adapters
    interpreting/   the graphs of a job's functions, checked as they run
    files/          tensors of uploaded blobs, and the result file
    models/         the models file, how each model is built, and which stay loaded

Each room imports only those below it. `work` says what a device is asked and answers,
`exceptions_to_problems` what users are told of an exception, `hints` what may help them, `errors`
what ends a worker, `command` what `gradbox worker` is given. Read `turns.turn` first, then
`device.process`, `device.serving` and `computations.execution`.
"""

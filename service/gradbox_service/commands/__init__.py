"""The service's part of the command line: one module a command.

To read in this order:

    up                 `gradbox up`: a whole box on this machine
    service            `gradbox service`: the HTTP service alone
    tokens             `gradbox tokens`: who may use the box
    storage            `gradbox storage`: what its files take, and cleaning by hand
    beside_the_box     what the last two share: they work on the box's own Redis
"""

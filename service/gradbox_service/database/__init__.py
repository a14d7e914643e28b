"""How gradbox talks to Redis, whatever it stores there.

To read in this order:

    connection              a client of it
    conditional_commands    commands that run together, if nothing changed meanwhile
    owned                   records that belong to owners, and what their files take
    leadership              the lock of the one service process that feeds the queue and cleans
    refusals                whether it refuses for now, and what is said then
"""

"""How gradbox talks to Redis, whatever it stores there.

connection              a client of it
conditional_commands    commands that run together, if nothing changed meanwhile
refusals                whether it refuses for now, and what is said then
"""

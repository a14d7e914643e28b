"""Attacks on a box, each with what must happen: `python -m proofs.attacks --list`, or by NAME.

Reading order: `attack` (what an attack is), `target` (the box it is tried on), then the tables:
`graphs`, `files`, `results`, `owners`, `requests`, `smuggling`, `limits`, `strings` on one box that
all share, and `storage`, `records`, `processes` on boxes of their own. They know a box as its users
do; what spoils a record has to know how it is stored.

The modules `test_bodies`, `test_connections`, `test_limits`, `test_other_users` and
`test_overhearing` attack a service alone (`services`), closely: to the byte and the millisecond.
What is refused by another part is tested beside that part: tests/graphs/test_refused.py and
test_kernels.py (tried on a whole box here too), tests/service/test_safetensors_header.py and
test_bad_input.py, tests/client/test_wire_faults.py.
"""

"""A box under faults: users who know the right answers, and processes killed and frozen meanwhile.

`python -m proofs.chaos --minutes 5 --seed 7` runs a real `gradbox up` and judges it. It knows the
box as its users and its owner do: the command, HTTP, the client, signals, /proc and the data
folder. Reading order: `run` (what happens when), `faults` and `proxy` (what goes wrong), `problems`
and `sessions` (who uses the box), `recovery` (how long it takes), `invariants` and `report` (what
must hold). `box` and `processes` are the box that it happens to.

`python -m proofs.chaos.training` uses the same box and faults on runs: their weights must come out
as if nothing had happened.
"""

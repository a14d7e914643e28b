"""Set gradients by the engine alone: against naive code and peers, over budgets of memory.

`replay` (its section: `replay_report`) keeps no graphs, `retention` some; `ends` keeps none and
all, of two source trees; `small_calls` tells what a call adds to a small shard; `penalties` and
`packing` measure one thing each.
"""

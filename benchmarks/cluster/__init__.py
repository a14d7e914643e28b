"""One job on several devices: `speed_up`, beside its `ceiling` and the `reduction` of sums.

`scale` simulates past this machine, from what `scale_report` measures of a shard here.
"""

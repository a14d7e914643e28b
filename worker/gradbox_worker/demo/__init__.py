"""`gradbox demo`: the main job on real text and a real model, checked against naive code.

`command` runs `task`, over pairs of `text`, on a `box` of its own, and `naive` beside it.
"""

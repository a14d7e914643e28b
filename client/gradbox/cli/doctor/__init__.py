"""`gradbox doctor`: what is wrong with an installation or a box, and the fix.

finding         what one check says
box_checks      the box that clients here are led to: address, answers, token, version, clock
machine_checks  this machine: packages, and as the place of a box Redis, models file, GPU, disk
command         all of them, printed
"""

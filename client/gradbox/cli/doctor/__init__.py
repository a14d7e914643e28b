"""`gradbox doctor`: what is wrong with an installation or a box, and the fix.

finding         what one check says
package_checks  the versions of the packages that gradbox needs
box_checks      the box that clients here are led to: address, answers, token, version, clock
machine_checks  this machine as the place of a box: Redis, models file, GPU, disk
command         all of them, printed
"""

"""Influence that is known to be right: scores beside peers' on the same models, and retrained ones.

tasks      two models small enough to retrain by the hundred: a classifier, and a regression
retrained  models of half subsets of the training samples, and the score that compares with them
box        scores and rows of stores, through a box
peers      the same from kronfluence, dattri and TRAK, each in a process of its own
report     what is compared, with which bars
"""

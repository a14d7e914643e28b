"""Programs that try the box as nobody's tests do: faults, attacks, a GPU, containers.

    chaos         kills, freezes and cuts off parts of a box at work, and counts what comes of it
    attacks       what a hostile user tries, each with how it must end
    cuda          everything that only a GPU can show, and a report of it
    containers    the images, built and started for real

Each is run by `python -m proofs.NAME`, and `chaos.training` beside them: runs that are trained
while parts of their box are killed. What they compute is checked against the tables of tests/.
"""

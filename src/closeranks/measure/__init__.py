"""What only a process with torch can find out: times of all-reduces and steps, and what was built.

Runs inside workers, or in a process of its own; what follows from the numbers is said elsewhere.

    build    which torch this is, and which kernels there are
    cases    what is trained; variants: by which class; rounds: how the steps are timed
    ways     how a tensor is all-reduced; turns: how the ways are timed
"""

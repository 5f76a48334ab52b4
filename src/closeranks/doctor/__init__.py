"""`closeranks doctor`: what this machine offers to a job, what is wrong with it, and the remedy.

    facts    what there is, read from the system; torch is asked in a process of its own
    checks   pure: facts in, verdicts with their remedies out
    report   the same for people and as JSON, and the exit code

Needs no torch: a torch that cannot be imported is one of the things to be told.
"""

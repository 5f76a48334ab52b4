"""`closeranks bench`: what all-reduces and steps take on this machine, and what follows from it.

    raw        what a rank brings home, as values and as JSON
    allreduce  all-reduces: ratios to gloo and to what memory allows
    findings   steps: ratios to torch's class
    tables     how it looks; picture: the same drawn
    command    starts the measurement (closeranks.measure) under our launcher, shows what came

Needs no torch. The scripts in the repository's bench/ use the same values, findings and tables.
"""

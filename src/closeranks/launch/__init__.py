"""Starts the workers of a job, watches them, passes on their output, and ends them. Needs no torch.

    run         from options to an exit code
    supervisor  one job from its start to its end
    crew        its workers as processes; starter, server and worker make them
    policy      what follows from the failure of one of them
    muster      who is alive in a job that survives deaths, and who is to be started again
    survival    what the supervisor does about it
    hosts       several machines: where launchers meet, and what they tell each other
    guard       takes everything along if the launcher is killed

A worker's life is a table (lifecycle), and so are the messages between it and the launcher, JSON
lines over a socket of its own:

    launcher -> worker   where    what are you doing? (hang reports)
    worker -> launcher   hello    I run
                         here     the answer to where
                         progress how far closeranks.progress has come
                         ended    my script has ended, how, and when
                         ranks    what lanes/seat.py says: a Ranks was made, a line to print once

A job whose script makes a Ranks loses nothing with a worker (lanes/). What its workers share is one
file in memory, made before them and handed to each; the launcher writes its roster (muster), so
that every death is seen by all at once, and starts the one that died again, alone.
"""

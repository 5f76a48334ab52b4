"""Starts the workers of a job, watches them, passes on their output, and ends them. Needs no torch.

    run         from options to an exit code
    supervisor  one job from its start to its end
    crew        its workers as processes; starter, server and worker make them
    policy      what follows from the failure of one of them
    guard       takes everything along if the launcher is killed

A worker's life is a table (lifecycle), and so are the messages between it and the launcher, JSON
lines over a socket of its own:

    launcher -> worker   where    what are you doing? (hang reports)
    worker -> launcher   hello    I run
                         here     the answer to where
                         progress how far closeranks.progress has come
                         ended    my script has ended, how, and when

How resilient training plugs in. A job that can lose workers brings a `DeathPolicy` that answers
RESTART_ONE: the supervisor then starts that worker again, from the same warm server, with its
`restarts` counted, and nobody else hears of it from here. A worker that makes such a job says so
with one more message, on which the supervisor exchanges its policy. What all workers share (a
memfd with the board of who is alive) is one more descriptor at the end of what every worker is
handed (worker.STORE is the last today), opened in run.py before the crew and named to the workers
by a variable next to CLOSERANKS_LAUNCHER; the launcher writes the generation word into it in
`Supervisor.on_death`, before anything else is decided. A line that is to be printed once, whoever
says it, is one more message as well.
"""

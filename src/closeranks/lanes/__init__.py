"""Resilient training: the same bits whatever the number of workers, and whoever falls.

A global batch is cut into a fixed number of *lanes*. A lane is a pure function of the state before
it, its samples and its seed, and lanes are summed in one fixed tree; so any worker may compute any
lane, again if need be, and sum any region of the gradient. What a worker has finished lies in
memory that outlives it. Nothing is applied before it is complete, so nothing is ever rolled back.

Read in this order: `naive` (what comes out, as a plain loop), `ranks` (the user's object), `steps`,
`worker` (one tick), `turn` (what to do next), `assign` (who does what), `folds` (the sums), `board`
and `words` (what workers tell each other), `script` and `rejoin` (how a newcomer gets to where the
others are).
"""

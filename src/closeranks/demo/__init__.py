"""What `closeranks demo` runs in its workers: two small trainings on real data, and their proof.

    digits    a convolutional net learns scikit-learn's handwritten digits
    gpt       a character GPT learns the source of Python's standard library
    training  the loop that both go through, and what is said of it at the end
    kill      the digits once more by door 3, with workers that are killed: `closeranks demo --kill`

Ordinary scripts, started as by `closeranks run -m closeranks.demo`; the command line adds
nothing to it. Must not know how workers are started.
"""

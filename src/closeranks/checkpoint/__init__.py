"""Durable state: what a training has become, on disk, readable without running foreign code.

    format     a tree of values as JSON and tensors
    tensors    tensors as a file in the format of safetensors
    snapshot   everything of one checkpoint, copied at one moment
    folder     the folder of a job's checkpoints: names, the lock, what dead jobs have left
    writer     a snapshot becomes a checkpoint, or nothing
    reader     a checkpoint becomes a tree again, or is said to be damaged

What is on disk is told in docs/checkpoints.md.
"""

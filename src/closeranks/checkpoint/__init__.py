"""Durable state: what a training has become, on disk, readable without running foreign code.

`format` turns a tree of values into text and tensors and back.
"""

"""Placeholder until the real one is written."""


def adopt(module):
    pass

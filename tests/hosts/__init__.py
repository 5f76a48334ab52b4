"""Tests of ranks on several hosts, which are network namespaces of this machine."""

"""Rewrites of a program's graph, one a file; `pipeline` lists them in order."""

"""Knobs: the catalogue of engine arguments per version, search spaces, and how a candidate becomes arguments.
This room imports no engine; it asks the target interpreter in another process.
"""

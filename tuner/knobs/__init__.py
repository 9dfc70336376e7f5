"""Knobs: the catalogue of engine arguments per version, search spaces, and the way from a candidate to argv.

No engine is imported; the target interpreter is asked in another process.
"""

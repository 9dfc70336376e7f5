"""The registry of published configurations (immutable versions, aliases and their moves) and their export to
the formats that deploy pipelines read.
"""

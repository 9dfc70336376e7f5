"""Traces of traffic: the canonical trace and its digest, importers, statistics, slices, and prompts made from
block ids.

A trace has no prompt text, unless the user asks for whole requests.
"""

"""What was sent: the canonical trace and its digest, importers, statistics, slices, and prompts made from
block ids. Holds no prompt text unless the user asks for raw bodies.
"""

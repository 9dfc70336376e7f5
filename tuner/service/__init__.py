"""The HTTP service: the API, its tokens, live events, metrics and pages. It reads and writes the history;
runs continue when it ends.
"""

"""One vLLM process tree: launched, watched, understood and stopped without a trace. What the engine says of
itself (log, exit, metrics, server_info) is read here and nowhere else.
"""

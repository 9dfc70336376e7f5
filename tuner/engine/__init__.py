"""One engine process tree: started, watched and stopped, with nothing left behind. What an engine says of
itself (log, exit code, metrics, server_info) is read in this room only.
"""

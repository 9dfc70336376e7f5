"""One engine process tree: started, watched and stopped, with nothing left behind. Only this room reads what
an engine reports (log, exit code, metrics, server_info).
"""

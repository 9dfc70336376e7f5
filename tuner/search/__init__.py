"""The next candidate from history: a pure function of stored trials and a seed. The only room that imports
optuna.
"""

"""The next candidate of a study: a function of its trials and a seed. The only room that imports
optuna.
"""

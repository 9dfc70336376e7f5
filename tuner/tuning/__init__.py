"""The main job: a study file becomes runs, runs become trials, finalists meet the baseline again, and the
winner becomes a profile. The only room that knows both engine and search.
"""

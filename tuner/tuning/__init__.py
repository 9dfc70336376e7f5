"""The main job: read a study file, run trials, measure the finalists again and publish the winner as a
profile. The only room that uses both engine and search.
"""

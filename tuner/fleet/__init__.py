"""Many nodes: fingerprints and leases, nightly schedules and windows, hand-over of production, dispatch to
other machines.
"""

"""Checks that a machine runs what the plan and the tests assume of it; `hybrid doctor` runs them for a user, `tests/gpu` for us.

`check` says what a check is, `processes` runs one in processes of its own, `report` writes all results into one JSON file. The checks of
`core` need torch, DeepSpeed and PyYAML; those of `full` need a whole install. On a machine that has the first three only,
`python -m hybrid.doctor core` runs them.
"""

"""Memory of shared devices: what moves when, how bytes leave and come back, what was measured.

`scheduler` decides (in the driver); `swap` moves storages in a role's process through a `tiers` tier; `probe` measures; `ledger` records.
"""

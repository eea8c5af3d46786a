"""Memory of shared devices: what moves when, how bytes leave and come back, what was measured."""

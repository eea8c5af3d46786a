"""What a ledger tells a person: `read` (rows), `timeline` (one GPU over time), `summary` (tables), `advice`; then HTML and Markdown."""

"""Before a run: what each phase will hold on each GPU (`prediction`), and the cheapest schedule that fits (`residency`)."""

"""Generation: vLLM engines on the pool's GPUs, and the way new weights reach them.

vLLM is imported in `engine.py`, `cpu_worker.py`, `worker_extension.py` and `weight_transfer.py` only, and never in the driver.
"""
